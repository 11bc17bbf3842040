"""The rows of a divergence from a teacher, which is dense or known at K classes of each row.

A dense teacher takes two folds: first the normalizers of both distributions, then the divergence and `pull`, the sum of
its gradient. If the classes are on several ranks, each fold has one gather of its sums. A top-k teacher takes one fold.

With u = log o - log w, a divergence sum_c w (log w - log o) of distributions w and o is computed as the sum of ::

    w (e^u - 1 - u) = o - w - w u    >= 0

The sums are equal, because w and o each sum to 1. No term is negative, and an error of either log-sum-exp, which is
common to all u of a row, enters only squared. So close distributions lose no precision, and equal ones give exactly 0.

With a top-k teacher a row has K + 1 cells: the K classes, and all others as one cell. The probability of the other
classes is summed directly, because 1 minus the probability of the K classes would cancel.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Setting
from xent.backends.torch.portable.facts import Facts, Index, activate, at, tolerance
from xent.backends.torch.portable.rows import Workspace
from xent.core.call import Dense, Options, TopK

__all__ = ["SECOND", "FinishedDivergence", "TeacherRows"]

SECOND = ("divergence", "pull")
"""The sums of the second fold."""


class TeacherRows:
    """R rows of a divergence: logits (R, C) of the student, and what the teacher knows of them."""

    _student: Any = None
    """x - peak and its exponentials, (R, C); `_others`: the same of the teacher, or without the K classes."""
    _others: Any = None
    _top: Any = None
    """(R, 1): the most probable class of the student, if all classes are here."""
    _made: tuple[Any, ...] = ()
    """The terms of the second fold, for the gradient."""

    def __init__(self, space: Workspace, block: Block, index: Index) -> None:
        self._names, self._facts, self._index, self._grad = space.names, space.facts, index, block.grad
        self._options, target = space.setting.call.options, space.setting.call.target
        self._dense = isinstance(target, Dense)
        x = self._x = block.logits.to(space.dtype, copy=True)
        self._slope = activate(x, self._facts.activation, None if block.grad is None else partial(torch.empty_like, x))
        if isinstance(target, Dense):
            assert block.teacher is not None
            self._other = block.teacher.to(space.dtype, copy=True)
            activate(self._other, target.activation)
            return
        assert isinstance(target, TopK)
        ids = at(target.ids, index).to(torch.int64) - space.setting.first
        here = (at(target.log_probs, index) != -torch.inf) & (ids >= 0) & (ids < x.shape[1])
        self._ids, self._here = ids.masked_fill(~here, 0), here
        self._other, self._of_ids = x, torch.full_like(ids, -torch.inf, dtype=x.dtype)
        if x.shape[1]:
            self._of_ids = torch.where(here, x.gather(1, self._ids), -torch.inf)
            # Entries that are not here have +inf, which does not change the class that they point to.
            removed = torch.where(here, -torch.inf, torch.inf).to(x.dtype)
            self._other = x.scatter_reduce(1, self._ids, removed, "amin")

    def fold(self) -> dict[str, Tensor]:
        """Return the sums (R,) of the first fold by name."""
        names, x, other, found = self._names, self._x, self._other, dict[str, Tensor]()
        if self._dense:
            found["teacher_top"] = x.new_zeros(len(x))
            if x.shape[1] and (self._options.kind == "tv" or self._options.beta != 0):
                self._top = x.argmax(-1, keepdim=True)
                found["teacher_top"] = other.gather(1, self._top)[:, 0]
        else:
            found = {f"known_{k}": one for k, one in enumerate(self._of_ids.unbind(1))}
        if "peak" in names:
            peak = found["peak"] = _largest(x)
            away, e = self._student = _relative(x, peak)
            found["rest"] = e.sum(-1)
            if "mixed" in names:
                found["mixed"] = torch.where(e == 0, 0, e * away).sum(-1)
        side = "teacher_" if self._dense else "others_"
        peak = found[side + "peak"] = _largest(other)
        self._others = _relative(other, peak)
        return found | {side + "rest": self._others[1].sum(-1)}

    def refold(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums of the second fold, from those of the first one over all classes.

        `pull` is the sum of p v, relative to the v of the most probable class: if that class has nearly all
        probability, its v differs from the mean by much less than either is, and the difference would cancel.
        """
        rest, peak_q, rest_q = sums["rest"], sums["teacher_peak"], sums["teacher_rest"]
        if self._student is None:
            self._student, self._others = _relative(self._x, sums["peak"]), _relative(self._other, peak_q)
        (away, p), (away_q, q), norms = self._student, self._others, rest_q.log() - rest.log()
        p.div_(rest[:, None])
        q.div_(rest_q[:, None])
        cost, v, factor = _terms(self._options, p, q, away, away_q.sub_(norms[:, None]))
        pull = torch.zeros_like(rest)
        if v is not None:
            if self._top is None:
                of_top = (sums["teacher_top"] - peak_q)[:, None]
                q_top = of_top.exp() / rest_q[:, None]
                v_top = _terms(self._options, 1 / rest[:, None], q_top, 0, of_top - norms[:, None])[1]
            else:
                v_top = v.gather(1, self._top)
            v = v - v_top
            pull = torch.where(p == 0, 0, p * v).sum(-1)
        self._made = p, q, v, factor
        return {"divergence": cost.sum(-1), "pull": pull}

    def gradient(self, made: dict[str, Tensor]) -> None:
        """Write the gradient of raw logits from the coefficients of `FinishedDivergence`."""
        facts, grad = self._facts, self._grad
        assert grad is not None
        if self._dense:
            if not self._made:
                self.refold(made)
            p, q, v, factor = self._made
            derivative = p - q if v is None else torch.where(p == 0, 0, p * (made["pull"][:, None] - v)) * factor
        else:
            _, e = _relative(self._other, made["others_peak"]) if self._others is None else self._others
            derivative = e.mul_(made["others"][:, None])
            derivative.scatter_add_(1, self._ids, torch.where(self._here, made["of_ids"], 0))
        scale = at(facts.scale, self._index) * facts.activation.logit_scale
        derivative *= scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale
        if self._slope is not None:
            derivative *= self._slope
        if facts.dead is not None:
            derivative.masked_fill_(at(facts.dead, self._index)[:, None], 0)
        grad.copy_(derivative)


def _largest(x: Tensor) -> Tensor:
    """Return the largest x (R, C) of each row, finite; C may be 0."""
    least = torch.finfo(x.dtype).min
    return x.amax(-1).clamp(min=least) if x.shape[1] else x.new_full((len(x),), least)


def _relative(x: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """Return x - peak, in the memory of x, and its exponentials."""
    x.sub_(peak[:, None])
    return x, x.exp()


class FinishedDivergence:
    """R rows with merged sums, (R,) each."""

    def __init__(self, setting: Setting, facts: Facts, sums: dict[str, Tensor], index: Index) -> None:
        self._facts, self._index, self._options, self._target = facts, index, setting.call.options, setting.call.target
        self._sums = sums if isinstance(self._target, Dense) else self._cells(sums)

    def results(self) -> dict[str, Tensor]:
        """Return the losses, and the entropies if the options name them."""
        sums, weight = self._sums, at(self._facts.weight, self._index)
        loss = sums["divergence"]
        found = {"loss": loss if weight is None else loss * weight}
        if "mixed" in sums:
            found["entropy"] = sums["rest"].log() - sums["mixed"] / sums["rest"]
        return found

    def coefficients(self) -> dict[str, Tensor]:
        """Return the coefficients of the gradient."""
        return self._sums

    def _cells(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the divergence from a top-k teacher, and dl/dx of the other classes and (R, K) of the K classes.

        dl/dx_c is others e^(x_c - others_peak) for the other classes.
        """
        target, options = self._target, self._options
        assert isinstance(target, TopK)
        peak, rest = sums["others_peak"], sums["others_rest"]
        x_k = torch.stack([one for name, one in sums.items() if name.startswith("known")], 1)
        log_q = at(target.log_probs, self._index).to(peak.dtype)
        given = log_q != -torch.inf
        top = torch.maximum(peak, x_k.amax(-1))
        grown = (peak - top).exp()
        e_k = (x_k - top[:, None]).exp()
        total = rest * grown + e_k.sum(-1)
        p_k, p_left, log_total = e_k / total[:, None], rest * grown / total, total.log()
        if target.tail == "renormalize":
            log_q = log_q - log_q.logsumexp(-1, keepdim=True)
        q = torch.where(given, log_q.exp(), 0)
        mass = q.sum(-1)
        left = (1 - mass).clamp(min=0) if target.tail == "bucket" else torch.zeros_like(mass)
        # The remaining mass is only rounding if no other class can have it.
        left = left.masked_fill((rest == 0) & (left <= tolerance(target)), 0)
        if options.kind == "tv":
            # dl/dx_c = p_c ((1 + s) b - (1 - s) a) / 4, with the signs s of p - q, and the sums a and b of p (1 + s)
            # and p (1 - s).
            p, apart = torch.cat((p_k, p_left[:, None]), 1), torch.cat((p_k - q, (p_left - left)[:, None]), 1)
            up = 1 + apart.sign()
            a, b = (p * up).sum(-1, keepdim=True), (p * (2 - up)).sum(-1, keepdim=True)
            pull = (up * b - (2 - up) * a) / 4
            loss, others, of_ids = apart.abs().sum(-1) / 2, pull[:, -1] * grown / total, p_k * pull[:, :-1]
        else:
            u = x_k - top[:, None] - log_total[:, None] - log_q
            if target.tail == "bucket":
                log_left = rest.log() + (peak - top) - log_total
                loss = torch.where(given, _gaps(q, p_k, u), 0).sum(-1) + (mass + left - 1)
                loss = loss + _gaps(left, p_left, log_left - left.log())
            else:
                loss = -torch.where(given, q * u, 0).sum(-1)
            others = (mass + left) * grown / total - torch.where(left == 0, 0, left / rest)
            of_ids = (mass + left)[:, None] * p_k - q
        return sums | {"divergence": loss, "others": others, "of_ids": of_ids}


def _terms(options: Options, p: Tensor, q: Tensor, log_p: Any, log_q: Tensor) -> tuple[Tensor, Any, Any]:
    """Return the terms of the divergence per class, and v and f: dl/dx_c = f p_c (sum_k p_k v_k - v_c).

    The logarithms may both lack one number. v is None where dl/dx_c is p_c - q_c.
    """
    beta = options.beta
    if options.kind == "tv":
        apart = p - q
        return apart.abs() / 2, apart.sign() / -2, 1
    if beta == 0:
        return _gaps(q, p, log_p - log_q), None, 1
    apart = log_q - log_p
    if beta == 1:
        return _gaps(p, q, apart), apart, 1
    # log m - log p = log((1 - beta) + beta e^apart), and similarly log m - log q; start from the larger of p and q.
    share = torch.where(apart > 0, apart.new_full((), 1 - beta), apart.new_full((), beta))
    common = torch.log1p(share * torch.expm1(-apart.abs()))
    from_p, from_q = common + apart.clamp(min=0), common - apart.clamp(max=0)
    m = (1 - beta) * p + beta * q
    return beta * _gaps(q, m, from_q) + (1 - beta) * _gaps(p, m, from_p), from_p, 1 - beta


def _gaps(w: Tensor, o: Tensor, u: Tensor) -> Tensor:
    """Return w (e^u - 1 - u) for o = w e^u, computed as o - w - w u if e^u is large; o where w is 0."""
    near = u.clamp(max=1)
    gap = torch.where(u > 1, o - w - w * u, w * (torch.expm1(near) - near).clamp(min=0))
    return torch.where(w == 0, o, gap)
