"""K + 1 cells: the K classes of a row that a top-k teacher knows, and all others as one cell.

The probability of the other classes is summed directly, because 1 minus the probability of the K classes would cancel.
The sums of a row over some classes are the rows of a (2 + K, R) tensor: the largest x of the other classes, the sum of
their e^(x - largest), and the x of the K classes, -inf where they are not among these.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.portable.gaps import gaps
from xent.backends.torch.portable.sums import normalizers

__all__ = ["Cells", "Known", "Others"]


class Known(NamedTuple):
    """What the teacher knows of R rows."""

    ids: Tensor
    """(R, K) int64: the classes, relative to the first one here; 0 for those that are not here, and for padding."""
    here: Tensor
    """(R, K) bool: whether the class is here."""
    given: Tensor
    """(R, K) bool: whether the entry is no padding."""
    log_q: Tensor
    """(R, K)"""


class Others(NamedTuple):
    """The logits x (R, C) of some classes, -inf at the K classes."""

    x: Tensor
    known: Known
    sums: Tensor

    @staticmethod
    def of(x: Tensor, known: Known) -> "Others":
        """Fold logits."""
        if not x.shape[1]:
            return Others(x, known, torch.stack((*normalizers(x), *x.new_full(known.ids.t().shape, -torch.inf))))
        # Padding entries have +inf, which does not change the class that they point to.
        removed = torch.where(known.here, -torch.inf, torch.inf).to(x.dtype)
        of_ids = torch.where(known.here, x.gather(1, known.ids), -torch.inf)
        x = x.scatter_reduce(1, known.ids, removed, "amin")
        return Others(x, known, torch.stack((*normalizers(x), *of_ids.t())))

    def derivative(self, cells: "Cells") -> Tensor:
        """Return dl/dx (R, C)."""
        made = (self.x - cells.peak[:, None]).exp_().mul_(cells.others[:, None])
        return made.scatter_add_(1, self.known.ids, torch.where(self.known.here, cells.of_ids, 0))


class Cells(NamedTuple):
    """The divergence (R,) of rows, and the factors of its derivative."""

    loss: Tensor
    peak: Tensor
    """(R,)"""
    others: Tensor
    """(R,): dl/dx_c = others e^(x_c - peak) for the other classes."""
    of_ids: Tensor
    """(R, K): dl/dx_k of the K classes."""

    @staticmethod
    def of(sums: Tensor, known: Known, tail: str, kind: str, tolerance: float) -> "Cells":
        """Return the cells from the sums over all classes."""
        peak, rest, x_k = sums[0], sums[1], sums[2:].t()
        top = torch.maximum(peak, x_k.amax(-1))
        grown = (peak - top).exp()
        e_k = (x_k - top[:, None]).exp()
        total = rest * grown + e_k.sum(-1)
        p_k, p_left, log_total = e_k / total[:, None], rest * grown / total, total.log()
        log_q = known.log_q
        if tail == "renormalize":
            log_q = log_q - log_q.logsumexp(-1, keepdim=True)
        q = torch.where(known.given, log_q.exp(), 0)
        mass = q.sum(-1)
        left = (1 - mass).clamp(min=0) if tail == "bucket" else torch.zeros_like(mass)
        # The remaining mass is only rounding if no other class can have it.
        left = left.masked_fill((rest == 0) & (left <= tolerance), 0)
        if kind == "tv":
            loss, of_others, of_ids = _variation(p_k, p_left, q, left)
            return Cells(loss, peak, of_others * grown / total, of_ids)
        u = x_k - top[:, None] - log_total[:, None] - log_q
        if tail == "bucket":
            log_left = rest.log() + (peak - top) - log_total
            loss = torch.where(known.given, gaps(q, p_k, u), 0).sum(-1)
            loss = loss + gaps(left, p_left, log_left - left.log()) + (mass + left - 1)
        else:
            loss = -torch.where(known.given, q * u, 0).sum(-1)
        others = (mass + left) * grown / total - torch.where(left == 0, 0, left / rest)
        return Cells(loss, peak, others, (mass + left)[:, None] * p_k - q)


def _variation(p_k: Tensor, p_left: Tensor, q: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total variation of cells, and dl/dx_c / p_c of the other classes (R,) and dl/dx_k of the K classes.

    dl/dx_c = p_c ((1 + s) b - (1 - s) a) / 4, with the signs s of p - q, and the sums a and b of p (1 + s) and
    p (1 - s).
    """
    p, apart = torch.cat((p_k, p_left[:, None]), 1), torch.cat((p_k - q, (p_left - left)[:, None]), 1)
    up = 1 + apart.sign()
    a, b = (p * up).sum(-1, keepdim=True), (p * (2 - up)).sum(-1, keepdim=True)
    pull = (up * b - (2 - up) * a) / 4
    return apart.abs().sum(-1) / 2, pull[:, -1], p_k * pull[:, :-1]
