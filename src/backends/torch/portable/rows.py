"""Fold a block of logits to the sums of its rows, and write its gradient from the coefficients of `finish`.

With a reference `peak` near the row's largest logit, a block's exponentials e^(x_c - peak) stay in memory between
`fold` and `gradient`, so that whole rows take one exponential per logit. The gradient of a logit is ::

    g_c = e^(x_c - peak) (alpha + beta (x_c - peak)) - share w_c - given q_c,  times 1 - tanh^2
    g_y = at_target in place of this, for class indices,  times 1 - tanh^2

w are the class weights, or for class probabilities the shares w' of the classes in the loss.

Rows of many classes on a CPU need no pass for the largest logit: their reference is 0 if the largest of the row's first
logits is near 0, otherwise that logit. Where the sum shows that a row has logits far above the reference, the row is
computed again with its largest logit. All this depends on the row alone, not on the rows beside it. Then `peak` is the
log-sum-exp, and the exponentials are those for `peak` times a factor per row.
"""

import math
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, smooths
from xent.backends.torch.memory import Rows, row_sum
from xent.backends.torch.portable.facts import Facts, Index, activate, at, weights_of
from xent.core.call import Probabilities

__all__ = ["LogitRows", "probabilities", "times"]

LEAST_CLASSES = 4096  # with fewer, the time of operations per row exceeds that of exponentials
_FIRST = 64  # classes whose largest logit becomes the reference
_NEAR = 32  # references of a smaller magnitude become 0
_LARGEST_SUM = 2.0**30  # so x is at most 21 above the reference, and the rounding of x - R at most 1e-6
_LARGEST_EXACT_SUM = 2.0**60  # for the reference 0, where nothing is rounded
_LOWEST = -1000.0  # e^x is 0 far above; 0 times infinity would be NaN


def times(weights: Any, values: Tensor) -> Tensor:
    """Return weights * values, and 0 where the weight is 0, even if the value is infinite."""
    if isinstance(weights, Tensor):
        return (weights * values).masked_fill(weights == 0, 0)
    return torch.zeros_like(values) if weights == 0 else values if weights == 1 else values * weights


def probabilities(facts: Facts, index: Index) -> Tensor:
    """Return the target probabilities of some rows, (R, C), in the caller's dtype."""
    target = facts.setting.call.target
    assert isinstance(target, Probabilities)
    values, rows = Rows(target.values), index if target.order is None else target.order[index].clamp(min=0)
    return values.block(rows.start, rows.stop) if isinstance(rows, slice) else values.take(rows)


def _exponentials(x: Tensor, out: Tensor) -> None:
    """Write e^x to `out`, which may be x. On a CPU, results below the normal numbers may become 0.

    PyTorch's CPU function takes 10 to 170 times as long for them. The first row tells whether there are any.
    """
    tiny = torch.finfo(x.dtype).tiny
    low = math.log(tiny) + 1
    if x.is_cpu and len(x) and bool(x[0].amin() < low):
        torch.threshold_(torch.clamp(x, min=low, out=out).exp_(), 3 * tiny, 0)
    else:
        torch.exp(x, out=out)


class LogitRows:
    """R rows of logits (R, C) of this rank's classes."""

    _place: Any = None
    """(R, 1): the column of the target, in rows whose target is `_here`: among these classes. None for all rows."""
    _here: Any = None
    _outside: Any = None
    """(R, C) bool: the classes that are not in the support of a row."""
    _e: Any = None
    """(R, C): e^(x - peak) without the target, divided by `_factor`; `_away`: x - peak; `_slope`: 1 - tanh^2."""
    _factor: Any = None
    _away: Any = None
    _slope: Any = None

    def __init__(self, facts: Facts, block: Block, index: Index) -> None:
        self._facts, self._index, self._least = facts, index, torch.finfo(facts.dtype).min
        self._z, self._exact, self._grad = block.logits, block.target_logits, block.grad
        first, width = facts.setting.first, block.logits.shape[1]
        if facts.target is None:
            return
        local = self._local = at(facts.target, index) - first
        self._place = local.clamp(0, width - 1)[:, None]
        self._here = local[:, None] == self._place if width < facts.setting.vocabulary else None
        if facts.support is not None:
            self._outside = facts.outside(index, first, width)

    def fold(self) -> dict[str, Tensor]:
        """Return the sums of these rows by name, (R,) each; classes are int64."""
        facts, names, z, place, outside = self._facts, self._facts.names, self._z, self._place, self._outside
        found, keeps, x = dict[str, Tensor](), facts.keeps, self._activated()
        simple = place is not None and self._here is None and outside is None and facts.plain
        if simple and "below" not in names and z.is_cpu and z.shape[1] >= LEAST_CLASSES:
            peak, found["rest"] = self._refer_quickly(x)
        else:
            peak = x.amax(-1).clamp_(min=self._least)
            if outside is not None:
                peak.masked_fill_(at(facts.invalid, self._index), torch.nan)
            self._put(self._exponentiate(x, peak, keeps), 0.0)
            found["rest"] = row_sum(self._e)
        found["peak"], away, e = peak, self._away, self._e
        if "key" in names:
            found["key"], found["place"] = self._largest(z, facts.activation.logit_scale)
        if "id" in names:
            found["id"] = at(facts.ids, self._index)
        if "squares" in names:
            found["squares"] = row_sum(e.square())
        if "deficit" in names:
            # The mean is a small difference of the peak and this sum: in float64 the sum adds no error of its own.
            deficit = away if outside is None else away.masked_fill(outside, 0)
            found["deficit"] = -deficit.sum(-1, dtype=torch.float64).to(facts.dtype)
            whole = torch.full_like(peak, z.shape[1])
            found["counted"] = whole if outside is None else whole - outside.sum(-1)
        if place is None:
            given, share = self._shares()
            found["cost"], found["mass"] = -row_sum(times(share, away)), row_sum(share)
            if "surprise" in names:
                found["surprise"], found["given"] = -row_sum(times(given, away)), row_sum(given)
            if "likely" in names:
                found["likely"], found["truth"] = self._largest(given, 1)
        else:
            z_y = (z.gather(1, place)[:, 0] if self._exact is None else self._exact).to(facts.dtype)
            if outside is not None:
                z_y = z_y.masked_fill(outside.gather(1, place)[:, 0], -torch.inf)
            found["target"] = z_y if self._here is None else z_y.masked_fill(~self._here[:, 0], 0)
            if keeps:
                self._put(away, 0.0)
            weight, w_y = facts.class_weight, 1 if self._here is None else self._here[:, 0].to(facts.dtype)
            if weight is not None:
                w_y = found["row_weight"] = weights_of(weight, self._local, None)
            if "below" in names:
                found["below"] = -row_sum(times(self._shares()[1], away))
                found["weights"] = peak.new_zeros(len(peak)) + (z.shape[1] if weight is None else weight.sum()) - w_y
        if "mixed" in names:
            found["mixed"] = row_sum(away.clamp_(min=_LOWEST).mul_(e))
        if self._factor is not None:
            for name in found.keys() & {"mixed", "squares"}:
                found[name] *= self._factor if name == "mixed" else self._factor.square()
        return found

    def gradient(self, made: dict[str, Any]) -> None:
        """Write the gradient with respect to the logits (R, C), whose memory may be that of the logits."""
        grad, alpha, beta, share, given = self._grad, made["alpha"], made["beta"], made["share"], made["given"]
        assert grad is not None
        e = self._e
        if e is None:
            e = self._exponentiate(self._activated(), made["peak"], beta is not None)
        if self._factor is not None:
            alpha, beta = alpha * self._factor, None if beta is None else beta * self._factor
        g = grad if grad.dtype == self._facts.dtype else e
        if beta is None:
            torch.mul(e, alpha[:, None], out=g)
        else:
            torch.mul(e, self._away.clamp_(min=_LOWEST).mul_(beta[:, None]).add_(alpha[:, None]), out=g)
        if share is not None:
            q, shares = self._shares()
            g.sub_(share[:, None] * shares)
            if given is not None:
                g.sub_(given[:, None] * q)
        if made["at_target"] is not None:
            self._put(g, made["at_target"][:, None])
        if self._slope is not None:
            g.mul_(self._slope)
        if made["zero"] is not None:
            g.masked_fill_(made["zero"][:, None], 0)
        if g is not grad:
            grad.copy_(g)

    def _activated(self, buffer: str = "x") -> Tensor:
        """Return x (R, C): the logits themselves if they are x, otherwise in a buffer."""
        z, facts, exact = self._z, self._facts, self._exact
        if facts.plain and z.dtype == self._facts.dtype and exact is None and self._outside is None:
            return z
        x = self._room(buffer).copy_(z)
        if exact is not None:
            self._put(x, exact[:, None].to(self._facts.dtype))
        if not facts.plain:
            temperature = at(facts.activation.temperature, self._index)
            temperature = None if temperature is None else temperature[:, None]
            self._slope = activate(x, facts.activation._replace(temperature=temperature), self._grad is not None)
        return x if self._outside is None else x.masked_fill_(self._outside, -torch.inf)

    def _exponentiate(self, x: Tensor, peak: Tensor, keeps: bool) -> Tensor:
        """Set e^(x - peak) and return it; `keeps`: also set x - peak."""
        away = self._away = torch.sub(x, peak[:, None], out=self._room("x"))
        e = self._e = self._room("e") if keeps else away
        _exponentials(away, e)
        return e

    def _refer_quickly(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Set e and the factor that it lacks, and for other sums x - peak; return peak and rest."""
        highest, keeps, place = x[:, :_FIRST].amax(-1), self._facts.keeps, self._place
        size = highest.abs()
        reference = highest.where((size >= _NEAR) & (size < torch.inf), 0)
        e = self._e = self._room("e") if keeps or x is self._z else x
        _exponentials(torch.sub(x, reference[:, None], out=e) if bool(reference.any()) else x, e)
        total, rest = self._split(e, place)
        low, high = total.aminmax()
        if not (low > 0 and high < _LARGEST_SUM):
            limit = torch.where(reference == 0, _LARGEST_EXACT_SUM, _LARGEST_SUM)
            far = ((total > 0) & (total < limit)).logical_not_().nonzero()[:, 0]
            if len(far):
                again = self._activated("again")[far]
                # An infinite or NaN logit makes a row's results NaN.
                reference[far] = largest = again.amax(-1).clamp_(min=self._least)
                again.sub_(largest[:, None]).exp_()
                total[far], rest[far] = self._split(again, place[far])
                e[far] = again
        peak = total.log().add_(reference).clamp_(min=self._least)
        factor = (reference - peak).exp_()
        self._factor = factor
        if keeps:
            self._away = torch.sub(x, peak[:, None], out=self._room("x"))
        return peak, rest * factor

    def _split(self, e: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of e with and without the target, and set the target's e to 0."""
        own = e.gather(1, place)[:, 0]
        rest = row_sum(e.scatter_(1, place, 0.0))
        return own + rest, rest

    def _shares(self) -> Any:
        """Return the target probabilities q and the shares w q' of each class in the loss, (R, C) both.

        For class indices, return None and the class weights, (C,) or 1.
        """
        facts, given, share = self._facts, None, self._facts.class_weight
        if facts.target is None:
            given, smoothing = (
                probabilities(facts, self._index).to(facts.dtype),
                facts.setting.call.options.label_smoothing,
            )
            q = given * (1 - smoothing) + smoothing / facts.setting.vocabulary if smooths(smoothing) else given
            share = q if share is None else q * share
        return given, 1 if share is None else share

    def _largest(self, values: Tensor, scale: Any) -> tuple[Tensor, Tensor]:
        """Return the largest of values (R, C), in the order of scale * values, and the first class that has it.

        NaN is the largest number. Without a logit above -inf in its support, the prediction of a row is class 0.
        """
        if isinstance(scale, Tensor) or scale <= 0:
            values = times(torch.as_tensor(scale, device=values.device).sign(), values)
        if self._outside is not None:
            values = values.masked_fill(self._outside, -torch.inf)
        key, place = values.max(-1)
        return key.to(self._facts.dtype), place + self._facts.setting.first

    def _put(self, values: Tensor, other: Tensor | float) -> None:
        """Replace the target's value in rows whose target is among these classes."""
        if self._place is not None:
            if self._here is not None:
                other = torch.where(self._here, other, values.gather(1, self._place))
            values.scatter_(1, self._place, other)

    def _room(self, name: str) -> Tensor:
        """Return memory (R, C), which all blocks share: C is the same in all of them."""
        held, grad = self._facts.rooms, self._grad
        if (
            name == "x"
            and grad is not None
            and grad.dtype == self._facts.dtype
            and grad.data_ptr() != self._z.data_ptr()
        ):
            return grad  # which is in the cache then when it is written
        if name not in held or len(held[name]) < len(self._z):
            held[name] = torch.empty(self._z.shape, dtype=self._facts.dtype, device=self._z.device)
        return held[name][: len(self._z)]
