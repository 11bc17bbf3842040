"""The rows of a divergence from a teacher, which is dense or known at K classes of each row.

If the classes are on several ranks, a dense teacher takes two folds, each with one gather of its sums: first those of
both normalizers, then those of the divergence and of its gradient. A top-k teacher takes one.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Setting, columns, wide
from xent.backends.torch.portable.activation import activate
from xent.backends.torch.portable.cells import Cells, Known, Others
from xent.backends.torch.portable.facts import Facts, Index, at
from xent.backends.torch.portable.gaps import terms
from xent.backends.torch.portable.sums import added, merge, normalizers
from xent.backends.torch.portable.top_k import tolerance
from xent.core.call import Dense, Options, TopK

__all__ = ["Both", "Coefficients", "Divergence"]

_PAIR = ("peak", "rest")


class Both(NamedTuple):
    """The normalizers (R,) of student and teacher over all ranks, and the x of the student's most probable class."""

    peak: Tensor
    rest: Tensor
    peak_q: Tensor
    rest_q: Tensor
    top_q: Tensor
    """The teacher's x of that class; the student's is `peak`."""

    def of(self, rows: slice) -> "Both":
        """Return those of some rows."""
        return Both(*(one[rows] for one in self))


class Coefficients(NamedTuple):
    """What the gradient of rows in shards needs: those of a dense teacher, or the cells of a top-k teacher."""

    both: Both | None
    pull: Tensor | None
    cells: Cells | None

    def of(self, rows: slice) -> "Coefficients":
        """Return those of some rows."""
        if self.cells is not None:
            return Coefficients(None, None, Cells(*(one[rows] for one in self.cells)))
        assert self.both is not None
        assert self.pull is not None
        return Coefficients(self.both.of(rows), self.pull[rows], None)


class Divergence:
    """The divergences of a call's rows."""

    passes = 6
    """The arrays of a block's size that exist at one time."""

    def __init__(self, setting: Setting, facts: Facts) -> None:
        target, self._dtype = setting.call.target, wide(setting.compute)
        self._options, self._facts, self._target, self._first = setting.call.options, facts, target, setting.first
        self._entropy = "entropy" in self._options.stats and setting.upstream is None
        names = columns(setting)
        self._names = tuple(name for name in (*_PAIR, "mixed") if name in names)
        """The sums of the student's rows alone."""
        if isinstance(target, TopK):
            self._ids, self._log_q = target.ids.to(torch.int64), target.log_probs.to(self._dtype)

    def rows(self, block: Block, index: Index) -> dict[str, Tensor]:
        """Return losses, and entropies if the options name them, (R,); write the gradient."""
        x, slope = self._student(block)
        found = {}
        if self._entropy:
            log_p = torch.log_softmax(x, -1)
            # log p is clamped because 0 times infinity would be NaN; p underflows to 0 far above log p = -1000.
            found["entropy"] = 0 - (log_p.exp() * log_p.clamp(min=-1000)).sum(-1)
        if isinstance(self._target, Dense):
            loss, derivative = _between(self._options, x, self._teacher(block), block.grad is not None)
        else:
            others = Others.of(x, self._known(x.shape[1], index))
            cells = self._cells(others.sums, others.known)
            loss, derivative = cells.loss, others.derivative(cells) if block.grad is not None else None
        if derivative is not None:
            self._write(block, index, slope, derivative)
        return found | self._weighed(loss, index)

    def fold(self, block: Block, index: Index) -> Tensor:
        """Return the sums (K, R) of a block in shards."""
        x, _ = self._student(block)
        sums = normalizers(x, "mixed" in self._names) if self._names else ()
        if isinstance(self._target, TopK):
            return torch.cat((*(one[None] for one in sums), Others.of(x, self._known(x.shape[1], index)).sums))
        t = self._teacher(block)
        top = t.gather(1, x.argmax(-1, keepdim=True))[:, 0] if x.shape[1] else x.new_zeros(len(x))
        return torch.stack((*sums, *normalizers(t), top))

    def both(self, sums: Tensor) -> Both:
        """Merge the sums (ranks, K, R) of the first of two folds."""
        own, other, tops = sums[:, :2], sums[:, -3:-1], sums[:, -1]
        ours, theirs = merge(_PAIR, own), merge(_PAIR, other)
        first = own[:, 0].argmax(0, keepdim=True)
        return Both(ours["peak"], ours["rest"], theirs["peak"], theirs["rest"], tops.gather(0, first)[0])

    def refold(self, block: Block, both: Both) -> Tensor:
        """Return the sums (2, R) of the second fold: the divergence, and p (v - v of the most probable class)."""
        x, _ = self._student(block)
        p, _, cost, v, _ = self._terms(x, self._teacher(block), both)
        pull = torch.zeros_like(p) if v is None else torch.where(p == 0, 0, p * v)
        return torch.stack((cost.sum(-1), pull.sum(-1)))

    def finish(
        self, first: Tensor, both: Both | None, second: Tensor | None, index: Index
    ) -> tuple[dict[str, Tensor], Coefficients]:
        """Return the results from the sums of all ranks of both folds, and the coefficients of the gradient."""
        found, pull, cells = {}, None, None
        own = len(self._names)
        if self._entropy:
            sums = merge(self._names, first[:, :own])
            found["entropy"] = sums["rest"].log() - sums["mixed"] / sums["rest"]
        if second is not None:
            loss, pull = added(second).unbind(0)
        else:
            others = merge(_PAIR, first[:, own : own + 2])
            merged = torch.stack((others["peak"], others["rest"], *first[:, own + 2 :].amax(0)))
            cells = self._cells(merged, self._known(0, index))
            loss = cells.loss
        return found | self._weighed(loss, index), Coefficients(both, pull, cells)

    def gradient(self, block: Block, index: Index, coefficients: Coefficients) -> None:
        """Write the gradient of a block in shards."""
        (x, slope), (both, pull, cells) = self._student(block), coefficients
        if cells is not None:
            derivative = Others.of(x, self._known(x.shape[1], index)).derivative(cells)
        else:
            assert both is not None
            assert pull is not None
            p, q, _, v, factor = self._terms(x, self._teacher(block), both)
            derivative = p - q if v is None else torch.where(p == 0, 0, p * (pull[:, None] - v)) * factor
        self._write(block, index, slope, derivative)

    def _student(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Return x (R, C), and dx/dz if it is needed and not constant."""
        x = block.logits.to(self._dtype, copy=True)
        return x, activate(x, self._facts.activation, None if block.grad is None else partial(torch.empty_like, x))

    def _teacher(self, block: Block) -> Tensor:
        """Return the x (R, C) of a dense teacher."""
        assert block.teacher is not None
        assert isinstance(self._target, Dense)
        t = block.teacher.to(self._dtype, copy=True)
        activate(t, self._target.activation)
        return t

    def _known(self, classes: int, index: Index) -> Known:
        """Return what a top-k teacher knows of rows with that number of classes here."""
        log_q, ids = at(self._log_q, index), at(self._ids, index) - self._first
        given = log_q != -torch.inf
        here = given & (ids >= 0) & (ids < classes)
        return Known(ids.masked_fill(~here, 0), here, given, log_q)

    def _cells(self, sums: Tensor, known: Known) -> Cells:
        assert isinstance(self._target, TopK)
        return Cells.of(sums, known, self._target.tail, self._options.kind, tolerance(self._target))

    def _terms(self, x: Tensor, t: Tensor, both: Both) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Any]:
        """Return p and q of some classes, and their `terms`, v relative to that of the most probable class."""
        p, q, cost, v, factor = self._of_classes(x, t, both)
        if v is not None:
            of_top = self._of_classes(both.peak[:, None], both.top_q[:, None], both)[3]
            assert of_top is not None
            v = v - of_top
        return p, q, cost, v, factor

    def _of_classes(self, x: Tensor, t: Tensor, both: Both) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Any]:
        x, t = x - both.peak[:, None], t - both.peak_q[:, None]
        p, q = x.exp() / both.rest[:, None], t.exp() / both.rest_q[:, None]
        return p, q, *terms(self._options, p, q, x - both.rest.log()[:, None], t - both.rest_q.log()[:, None])

    def _weighed(self, loss: Tensor, index: Index) -> dict[str, Tensor]:
        weight = at(self._facts.weight, index)
        return {"loss": loss if weight is None else loss * weight}

    def _write(self, block: Block, index: Index, slope: Tensor | None, derivative: Tensor) -> None:
        """Write the gradient of raw logits from that of x, which may be overwritten."""
        facts = self._facts
        assert block.grad is not None
        scale = at(facts.scale, index) * facts.activation.logit_scale
        derivative *= scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale
        if slope is not None:
            derivative *= slope
        if facts.dead is not None:
            derivative.masked_fill_(at(facts.dead, index)[:, None], 0)
        block.grad.copy_(derivative)


def _between(options: Options, x: Tensor, t: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """Return the divergence (R,) of full distributions, and if `wanted` its derivative (R, V) with respect to x."""
    # A softmax is more accurate than the exponential of the rounded log-softmax.
    p, q = torch.softmax(x, -1), torch.softmax(t, -1)
    cost, v, factor = terms(options, p, q, torch.log_softmax(x, -1), torch.log_softmax(t, -1))
    found = cost.sum(-1)
    if not wanted:
        return found, None
    return found, p - q if v is None else _pulled(p, v) * factor


def _pulled(p: Tensor, v: Tensor) -> Tensor:
    """Return p (sum_c p_c v_c - v); 0 where p is 0.

    v of the most probable class is subtracted from v first: if that class has nearly all probability, its v differs
    from the mean by much less than either is, and the difference would cancel.
    """
    v = v - v.gather(1, p.argmax(-1, keepdim=True))
    mean = torch.where(p == 0, 0, p * v).sum(-1, keepdim=True)
    return torch.where(p == 0, 0, p * (mean - v))
