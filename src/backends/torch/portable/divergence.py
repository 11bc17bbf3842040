"""The rows of a divergence from a teacher, which is dense or known at K classes of each row.

With u = log o - log w, a divergence sum_c w (log w - log o) of distributions w and o is computed as the sum of ::

    w (e^u - 1 - u) = o - w - w u    >= 0

The sums are equal, because w and o each sum to 1. No term is negative, and an error of either log-sum-exp, which is
common to all u of a row, enters only squared. So close distributions lose no precision, and equal ones give exactly 0.
"""

from functools import partial

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Setting, wide
from xent.backends.torch.portable.activation import activate
from xent.backends.torch.portable.facts import Facts, Index, at
from xent.backends.torch.portable.top_k import tolerance
from xent.core.call import Dense, Options, TopK

__all__ = ["Divergence"]


class Divergence:
    """The divergences of a call's rows."""

    passes = 6
    """The arrays of a block's size that exist at one time."""

    def __init__(self, setting: Setting, facts: Facts) -> None:
        target, self._dtype = setting.call.target, wide(setting.compute)
        self._options, self._facts, self._target = setting.call.options, facts, target
        self._is_forward = setting.upstream is None
        if isinstance(target, TopK):
            self._ids, self._log_q = target.ids.to(torch.int64), target.log_probs.to(self._dtype)
            self._tolerance = tolerance(target)

    def rows(self, block: Block, index: Index) -> dict[str, Tensor]:
        """Return losses, and entropies if the options name them, (R,); write the gradient."""
        facts, found = self._facts, dict[str, Tensor]()
        x = block.logits.to(self._dtype, copy=True)
        slope = activate(x, facts.activation, None if block.grad is None else partial(torch.empty_like, x))
        if "entropy" in self._options.stats and self._is_forward:
            log_p = torch.log_softmax(x, -1)
            # log p is clamped because 0 times infinity would be NaN; p underflows to 0 far above log p = -1000.
            found["entropy"] = 0 - (log_p.exp() * log_p.clamp(min=-1000)).sum(-1)
        if isinstance(self._target, Dense):
            assert block.teacher is not None
            t = block.teacher.to(self._dtype, copy=True)
            activate(t, self._target.activation)
            loss, derivative = _between(self._options, x, t, block.grad is not None)
        else:
            loss, derivative = self._from_top_k(x, index, block.grad is not None)
        weight = at(facts.weight, index)
        found["loss"] = loss if weight is None else loss * weight
        if block.grad is None or derivative is None:
            return found
        scale = at(facts.scale, index) * facts.activation.logit_scale
        derivative *= scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale
        if slope is not None:
            derivative *= slope
        if facts.dead is not None:
            derivative.masked_fill_(at(facts.dead, index)[:, None], 0)
        block.grad.copy_(derivative)
        return found

    def _from_top_k(self, x: Tensor, index: Index, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """Return the divergence (R,) from K classes of each row, and if `wanted` its derivative (R, V)."""
        assert isinstance(self._target, TopK)
        ids, log_q, tail = at(self._ids, index), at(self._log_q, index), self._target.tail
        log_p = torch.log_softmax(x, -1)
        known = log_q != -torch.inf
        ids = ids.masked_fill(~(known & (ids >= 0) & (ids < log_p.shape[1])), 0)
        if tail == "renormalize":
            log_q = log_q - log_q.logsumexp(-1, keepdim=True)
        q = torch.where(known, log_q.exp(), 0)
        log_p_k = log_p.gather(1, ids)
        mass = q.sum(-1)
        if tail != "bucket" and self._options.kind == "kl":
            found = torch.where(known, q * (log_q - log_p_k), 0).sum(-1)
            if not wanted:
                return found, None
            return found, (torch.softmax(x, -1) * mass[:, None]).scatter_add_(1, ids, -q)
        # Padding entries have +inf, which does not change the class that they point to.
        removed = torch.where(known, -torch.inf, torch.inf).to(log_p.dtype)
        others = log_p.scatter_reduce(1, ids, removed, "amin")
        log_p_left = others.logsumexp(-1)
        left = (1 - mass).clamp(min=0) if tail == "bucket" else torch.zeros_like(mass)
        # The remaining mass is only rounding if no other class can have it.
        left = left.masked_fill((log_p_left == -torch.inf) & (left <= self._tolerance), 0)
        p_k = torch.where(known, log_p_k.exp(), 0)
        if self._options.kind == "tv":
            return _variation_of_cells(torch.softmax(x, -1), ids, known, p_k - q, log_p_left.exp() - left, wanted)
        cells = torch.where(known, _gaps(q, p_k, log_p_k - log_q), 0).sum(-1)
        found = cells + _gaps(left, log_p_left.exp(), log_p_left - left.log()) + (mass + left - 1)
        if not wanted:
            return found, None
        derivative = (torch.softmax(x, -1) * (mass + left)[:, None]).scatter_add_(1, ids, -q)
        shares = torch.softmax(others, -1) * left[:, None]
        return found, derivative - torch.where(left[:, None] == 0, 0, shares)


def _between(options: Options, x: Tensor, t: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """Return the divergence (R,) of full distributions, and if `wanted` its derivative (R, V) with respect to x."""
    # A softmax is more accurate than the exponential of the rounded log-softmax.
    beta, p, q = options.beta, torch.softmax(x, -1), torch.softmax(t, -1)
    if options.kind == "tv":
        apart = p - q
        return apart.abs().sum(-1) / 2, _pulled(p, apart.sign() / -2) if wanted else None
    log_p, log_q = torch.log_softmax(x, -1), torch.log_softmax(t, -1)
    if beta == 0:
        return _gaps(q, p, log_p - log_q).sum(-1), p - q if wanted else None
    apart = log_q - log_p
    if beta == 1:
        return _gaps(p, q, apart).sum(-1), _pulled(p, apart) if wanted else None
    # log m - log p = log((1 - beta) + beta e^apart), and similarly log m - log q; start from the larger of p and q.
    share = torch.where(apart > 0, apart.new_full((), 1 - beta), apart.new_full((), beta))
    common = torch.log1p(share * torch.expm1(-apart.abs()))
    from_p, from_q = common + apart.clamp(min=0), common - apart.clamp(max=0)
    m = (1 - beta) * p + beta * q
    found = beta * _gaps(q, m, from_q).sum(-1) + (1 - beta) * _gaps(p, m, from_p).sum(-1)
    return found, _pulled(p, from_p) * (1 - beta) if wanted else None


def _variation_of_cells(
    p: Tensor, ids: Tensor, known: Tensor, of_ids: Tensor, of_others: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the total variation (R,), and if `wanted` its derivative, from p - q of K classes and of all others."""
    found = (of_ids.abs().sum(-1) + of_others.abs()) / 2
    if not wanted:
        return found, None
    # Padding entries change nothing.
    others = of_others.sign()[:, None]
    signs = others.expand_as(p).scatter_add(1, ids, torch.where(known, of_ids.sign() - others, 0))
    return found, _pulled(p, signs / -2)


def _gaps(w: Tensor, o: Tensor, u: Tensor) -> Tensor:
    """Return w (e^u - 1 - u) for o = w e^u, computed as o - w - w u if e^u is large; o where w is 0."""
    near = u.clamp(max=1)
    gap = torch.where(u > 1, o - w - w * u, w * (torch.expm1(near) - near).clamp(min=0))
    return torch.where(w == 0, o, gap)


def _pulled(p: Tensor, u: Tensor) -> Tensor:
    """Return p (sum_c p_c u_c - u); 0 where p is 0.

    u of the most probable class is subtracted from u first: if that class has nearly all probability, its u differs
    from the mean by much less than either is, and the difference would cancel.
    """
    u = u - u.gather(1, p.argmax(-1, keepdim=True))
    mean = torch.where(p == 0, 0, p * u).sum(-1, keepdim=True)
    return torch.where(p == 0, 0, p * (mean - u))
