"""Rows of logits: their sums over blocks of classes, and their gradients.

The activation is x = softcap * tanh(logit_scale * z / softcap) / temperature. Slopes are 1 - tanh^2; the constant
factor logit_scale / temperature of dx/dz is part of the coefficients of a row.

With a reference `peak` near the row's largest logit, a block's exponentials e^(x_c - peak) stay in memory between
`fold` and `gradient`, so that whole rows take one exponential per logit. The gradient of a logit is ::

    g_c = e^(x_c - peak) (alpha + beta (x_c - peak)) - share w_c - of_q q_c,  times 1 - tanh^2
    g_y = at_target in place of this, for class indices,  times 1 - tanh^2

with the coefficients of `xent.backends.torch.portable.steps`. w are the class weights, or for class probabilities the
shares w' of the classes in the loss.

On a CPU a fused softmax computes the exponentials of rows that are not narrow: those relative to `peak`, divided by a
factor of each row. All this depends on the row alone, not on the rows beside it.
"""

from typing import Any, cast

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Coefficients, smooths
from xent.backends.torch.memory import RowView, row_sum, span
from xent.backends.torch.portable.facts import Facts, masked
from xent.core.call import Activation, Probabilities
from xent.core.spec import Scalar

__all__ = ["LogitRows", "activate", "ordered", "probabilities", "times"]

_NARROW = 256  # classes: rows of as many or fewer take an exponential of x - peak
_FIRST = 1024  # classes whose largest logit becomes the peak
_LEAST_PART = 2.0**-16  # of the probability, which they have then: x is at most 11.1 above the peak
_LOWEST = -1000.0  # e^x is 0 far above; 0 times infinity would be NaN


def activate(x: Tensor, activation: Activation, needs_slope: bool = False) -> Tensor | None:
    """Replace logits by x, in place. With `needs_slope` and a softcap return 1 - tanh^2, else None.

    x is (R,) or (R, C), a temperature (R,).
    """
    scale, cap, temperature = activation
    if isinstance(scale, Tensor) or scale != 1:
        x.mul_(scale)
    slope = None
    if cap is not None:
        x.div_(cap).tanh_()
        slope = x.square().neg_().add_(1) if needs_slope else None
        x.mul_(cap)
    if temperature is not None:
        x.div_(temperature if x.dim() == 1 else temperature[:, None])
    return slope


def ordered(z: Tensor, scale: Scalar) -> Tensor:
    """Return raw logits in the order of scale * z."""
    if isinstance(scale, Tensor) or scale <= 0:
        return times(torch.as_tensor(scale, device=z.device).sign(), z)
    return z


def times(weights: Scalar, array: Tensor) -> Tensor:
    """Return weights * values, and 0 where the weight is 0, even if the value is infinite."""
    if isinstance(weights, Tensor):
        return (weights * array).masked_fill(weights == 0, 0)
    return torch.zeros_like(array) if weights == 0 else array if weights == 1 else array * weights


def probabilities(facts: Facts) -> Tensor:
    """Return the target probabilities of rows, (R, C), in the caller's dtype."""
    view = RowView(cast(Probabilities, facts.setting.call.target).probs)
    return view[facts.index if facts.order is None else facts.order.clamp(min=0)]


class LogitRows:
    """R rows of logits (R, C) of this rank's classes."""

    _place: Any = None
    """(R, 1): the column of the target. None if the targets are no classes."""
    _elsewhere: Tensor | None = None
    """(R,) bool: rows whose target is not among these classes; None if there are none."""
    _outside: Tensor | None = None
    """(R, C) bool: the classes that are not in the support of a row."""
    _e: Any = None
    """(R, C): e^(x - peak) without the target, divided by `_factor`; `_away`: x - peak; `_slope`: 1 - tanh^2."""
    _factor: Tensor | None = None
    _away: Any = None
    _slope: Tensor | None = None

    def __init__(self, facts: Facts, block: Block) -> None:
        self._facts, width, first = facts, block.logits.shape[1], facts.setting.first
        self._z, self._exact, self._grad = block.logits, block.target_logits, block.grad
        if facts.target is None:
            return
        self._place = facts.target[:, None]
        if width < facts.setting.vocabulary:
            local = self._place - first
            self._place = local.clamp(0, width - 1)
            self._elsewhere = (local != self._place)[:, 0]
        if facts.begin is not None:
            self._outside = facts.outside(first, width)

    def fold(self) -> dict[str, Tensor]:
        """Return the sums of these rows by name, (R,) each; classes are int64."""
        facts, names, z, place, outside = self._facts, self._facts.names, self._z, self._place, self._outside
        keeps = not {"mixed", "below", "deficit", "cost", "squares"}.isdisjoint(names)
        peak = self._exponentiate(keeps)
        away, e = self._away, self._e
        self._put(e, 0.0)
        sums: dict[str, Tensor] = {"peak": peak, "rest": row_sum(e)}
        if "key" in names:
            sums["key"], sums["place"] = self._largest(z, facts.activation.logit_scale)
        if "squares" in names:
            sums["squares"] = row_sum(e.square())
        if "deficit" in names:
            # The mean is a small difference of the peak and this sum: in float64 the sum adds no error of its own.
            deficit = masked(away, outside, 0)
            sums["deficit"] = -deficit.sum(-1, dtype=torch.float64).to(facts.dtype)
            whole = torch.full_like(peak, z.shape[1])
            sums["counted"] = whole if outside is None else whole - outside.sum(-1)
        if place is None:
            q, share = self._shares()
            sums["cost"], sums["mass"] = -row_sum(times(share, away)), row_sum(share)
            if "surprise" in names:
                sums["surprise"], sums["given"] = -row_sum(times(q, away)), row_sum(q)
            if "likely" in names:
                sums["likely"], sums["truth"] = self._largest(q, 1)
        else:
            z_y = (z.gather(1, place)[:, 0] if self._exact is None else self._exact).to(facts.dtype)
            if outside is not None:
                z_y = z_y.masked_fill(outside.gather(1, place)[:, 0], -torch.inf)
            sums["target"] = z_y if self._elsewhere is None else z_y.masked_fill(self._elsewhere, 0)
            if keeps:
                self._put(away, 0.0)
            weight = facts.class_weight
            if weight is not None or "below" in names:
                w_y = torch.ones_like(peak) if weight is None else weight[place[:, 0]]
                sums["row_weight"] = masked(w_y, self._elsewhere, 0)
            if "below" in names:
                sums["below"] = -row_sum(times(self._shares()[1], away))
                sums["weights"] = (z.shape[1] if weight is None else weight.sum()) - sums["row_weight"]
        if "mixed" in names:
            sums["mixed"] = row_sum(away.clamp_(min=_LOWEST).mul_(e))
        if self._factor is not None:
            for name in sums.keys() & {"rest", "mixed", "squares"}:
                sums[name] *= self._factor.square() if name == "squares" else self._factor
        return sums

    def gradient(self, coefficients: Coefficients) -> None:
        """Write the gradient with respect to the logits (R, C), whose memory may be that of the logits."""
        grad, alpha, beta = self._grad, coefficients["alpha"], coefficients["beta"]
        share, q_factor = coefficients["share"], coefficients["of_q"]
        assert grad is not None
        if self._e is None:
            self._exponentiate(beta is not None, coefficients["peak"])
        e = cast(Any, self._e)
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
            if q_factor is not None:
                g.sub_(q_factor[:, None] * q)
        if coefficients["at_target"] is not None:
            self._put(g, coefficients["at_target"][:, None])
        if self._slope is not None:
            g.mul_(self._slope)
        if coefficients["zero"] is not None:
            g.masked_fill_(coefficients["zero"][:, None], 0)
        if g is not grad:
            grad.copy_(g)

    def of_target(self) -> Tensor:
        """Return the target's logit (R,) in the order of x; -inf outside of the support, 0 for another rank's."""
        return masked(self._order.gather(1, self._place)[:, 0], self._elsewhere, 0)

    def count_above(self, of_target: Tensor) -> Tensor:
        """Return the number (R,) of logits that are larger than that of the target; NaN is the largest number."""
        above = ~(self._order <= of_target[:, None])
        return above.sum(-1).masked_fill(of_target.isnan(), 0)

    @property
    def _order(self) -> Tensor:
        """The logits (R, C) in the order of x, -inf outside of the support."""
        return masked(ordered(self._z, self._facts.activation.logit_scale), self._outside, -torch.inf)

    def _exponentiate(self, keeps: bool, peak: Tensor | None = None) -> Tensor:
        """Set e, its factor and the slope, and return the peak, by default a large x; `keeps`: also set x - peak."""
        x, facts, exact, outside = self._z, self._facts, self._exact, self._outside
        least, largest = torch.finfo(facts.dtype).min, x
        if not facts.x_is_z or x.dtype != facts.dtype or exact is not None or outside is not None:
            x = self._room("x").copy_(x)
            if exact is not None:
                self._put(x, exact[:, None].to(facts.dtype))
            self._slope = activate(x, facts.activation, self._grad is not None)
            if outside is not None:
                x.masked_fill_(outside, -torch.inf)
        fuses = x.is_cpu and x.shape[1] > _NARROW
        if fuses:
            # One pass over x. `exp` would take 10 to 170 times as long for results below the normal numbers.
            e = self._e = torch.softmax(x, -1, out=self._room("e"))
            largest, part = x[:, :_FIRST].amax(-1), e[:, :_FIRST].amax(-1)
            near = part > _LEAST_PART
            if not bool(near.all()):
                largest, part = torch.where(near, largest, x.amax(-1)), torch.where(near, part, e.amax(-1))
                empty = largest == -torch.inf
                e.masked_fill_(empty[:, None], 0)
                part.masked_fill_(empty, 1)
                largest.clamp_(min=least)
            self._factor = part.reciprocal_() if peak is None else (largest - peak).exp_().div_(part)
        elif peak is None:
            largest = x.amax(-1).clamp_(min=least)
        if peak is None:
            peak = largest
            if outside is not None:
                peak = masked(peak, facts.invalid, torch.nan)
        if keeps or not fuses:
            self._away = torch.sub(x, peak[:, None], out=self._room("x"))
        if not fuses:
            self._e = torch.exp(self._away, out=self._room("e") if keeps else self._away)
        return peak

    def _shares(self) -> Any:
        """Return the target probabilities q and the shares w q' of each class in the loss, (R, C) both.

        For class indices, return None and the class weights, (C,) or 1.
        """
        facts, probs, share = self._facts, None, self._facts.class_weight
        if facts.target is None:
            probs, smoothing = probabilities(facts).to(facts.dtype), facts.setting.call.options.label_smoothing
            q = probs * (1 - smoothing) + smoothing / facts.setting.vocabulary if smooths(smoothing) else probs
            share = q if share is None else q * share
        return probs, 1 if share is None else share

    def _largest(self, array: Tensor, scale: Scalar) -> tuple[Tensor, Tensor]:
        """Return the largest of values (R, C), in the order of scale * values, and the first class that has it.

        NaN is the largest number. Without a logit above -inf in its support, the prediction of a row is class 0.
        """
        key, place = masked(ordered(array, scale), self._outside, -torch.inf).max(-1)
        return key.to(self._facts.dtype), place + self._facts.setting.first

    def _put(self, array: Tensor, other: Tensor | float) -> None:
        """Replace the target's value in rows whose target is among these classes."""
        if self._place is not None:
            if self._elsewhere is not None:
                other = torch.where(self._elsewhere[:, None], array.gather(1, self._place), other)
            array.scatter_(1, self._place, other)

    def _room(self, name: str) -> Tensor:
        """Return memory (R, C): that of the gradient for e, if it is free; or one that all blocks share.

        C is the same in all of them.
        """
        held, z, dtype, grad = self._facts.rooms, self._z, self._facts.dtype, self._grad
        if grad is not None and grad.data_ptr() == z.data_ptr():
            grad = None
        if name == "e" and grad is not None and grad.dtype == dtype and grad.is_contiguous():
            return grad
        if name not in held or len(held[name]) < len(z):
            held[name] = z.new_empty(z.shape, dtype=dtype)
        return span(held[name], 0, len(z))
