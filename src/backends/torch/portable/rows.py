"""Fold a block of logits to the sums of its rows, and write its gradient from the coefficients of `finish`.

With a reference `peak` near the row's largest logit, a block's exponentials e^(x_c - peak) stay in memory between
`fold` and `gradient`, so that whole rows take one exponential per logit. The gradient of a logit is ::

    g_c = e^(x_c - peak) (alpha + beta (x_c - peak)) - delta w_c - share w'_c - given q_c,  times 1 - tanh^2
    g_y = at_target, for class indices

Rows of many classes on a CPU need no pass for the largest logit: their reference is 0 if the largest of the row's first
logits is near 0, otherwise that logit. Where the sum shows that a row has logits far above the reference, the row is
computed again with its largest logit. All this depends on the row alone, not on the rows beside it. Then `peak` is the
log-sum-exp, and the exponentials are those for `peak` times a factor per row.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Setting, columns, smooths, wide
from xent.backends.torch.memory import Rows, row_sum
from xent.backends.torch.portable.facts import Exponentials, Facts, Index, activate, at, times
from xent.core.call import Probabilities

__all__ = ["Coefficients", "LogitRows", "Workspace"]

LEAST_CLASSES = 4096  # with fewer, the time of operations per row exceeds that of exponentials
_FIRST = 64  # classes whose largest logit becomes the reference
_NEAR = 32  # references of a smaller magnitude become 0
_LARGEST_SUM = 2.0**30  # so x is at most 21 above the reference, and the rounding of x - R at most 1e-6
_LARGEST_EXACT_SUM = 2.0**60  # for the reference 0, where nothing is rounded
_LOWEST = -1000.0  # e^x is 0 far above; 0 times infinity would be NaN


class Coefficients(NamedTuple):
    """Coefficients of the gradient of R rows, each (R,); None for 0."""

    peak: Tensor
    alpha: Tensor
    beta: Tensor | None = None
    delta: Tensor | None = None
    share: Tensor | None = None
    given: Tensor | None = None
    at_target: Tensor | None = None
    zero: Tensor | None = None
    """(R,) bool: rows whose gradient is exactly 0, whatever their logits are."""
    invalid: Tensor | None = None
    """(R,) bool: rows whose gradient is NaN; only with a support."""


class Workspace:
    """The setting of a call, its facts and the names of its sums, and buffers that all blocks share."""

    def __init__(self, setting: Setting, facts: Facts) -> None:
        self.setting, self.facts, self.names, self.dtype = setting, facts, columns(setting), wide(setting.compute)
        self.exponentials = Exponentials()
        self.keeps = not {"mixed", "below", "deficit", "cost"}.isdisjoint(self.names)
        """Whether sums contain x - peak. Statistics have no influence on the bits of other results."""
        self._buffers: dict[str, Tensor] = {}

    def given(self, index: Index) -> Tensor:
        """Return the target probabilities of some rows, (R, C), in the caller's dtype."""
        target = self.setting.call.target
        assert isinstance(target, Probabilities)
        values = Rows(target.values)
        if target.order is not None:
            return values.take(at(target.order, index).clamp(min=0))
        if isinstance(index, Tensor):
            return values.take(index)
        return values.block(0, self.setting.count) if index is None else values.block(index.start, index.stop)

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """Return memory with the shape of `like` (R, C)."""
        held = self._buffers.get(name)
        if held is None or held.shape[0] < like.shape[0] or held.shape[1] != like.shape[1]:
            held = self._buffers[name] = torch.empty(like.shape, dtype=self.dtype, device=like.device)
        return held if held.shape[0] == like.shape[0] else held[: like.shape[0]]


class LogitRows:
    """R rows of logits (R, C) of this rank's classes; with a support, of the classes in it."""

    _columns: Any = None
    """(R, L): the classes here of a support; `_outside` has the entries that are none."""
    _outside: Any = None
    _invalid: Any = None
    _place: Any = None
    """(R, 1): the column of the target, in rows whose target is `_owned`: among these classes. None for all rows."""
    _owned: Any = None
    _e: Any = None
    """(R, C): e^(x - peak), in long rows divided by `_factor`; `_away`: x - peak."""
    _factor: Any = None
    _away: Any = None
    _slope: Any = None
    _held: Any = None

    def __init__(self, space: Workspace, block: Block, index: Index) -> None:
        self._space, self._facts, self._dtype, self._index = space, space.facts, space.dtype, index
        self._z, self._exact, self._grad = block.logits, block.target_logits, block.grad
        self._offset, width, facts = space.setting.first, block.logits.shape[1], space.facts
        if facts.target is None or not width:
            return
        self._place = target = at(facts.target, index)[:, None]
        if facts.support is not None:
            classes, valid, self._invalid = facts.support.of(index)
            local = classes - self._offset
            valid &= (local >= 0) & (local < width)
            self._columns, self._outside = local.masked_fill_(~valid, 0), ~valid
            self._z = self._z.gather(1, self._columns)
            here = (classes == target) & valid
            self._owned, self._place = here.any(-1, keepdim=True), here.to(torch.uint8).argmax(-1, keepdim=True)
        elif width < space.setting.vocabulary:
            local = target - self._offset
            self._owned, self._place = (local >= 0) & (local < width), local.clamp(0, width - 1)

    def fold(self) -> dict[str, Tensor]:
        """Return the sums of these rows by name, (R,) each; classes are int64."""
        space, facts, names, z = self._space, self._facts, self._space.names, self._z
        if not z.shape[1]:
            zero = torch.zeros(len(z), dtype=self._dtype, device=z.device)
            lowest = zero - torch.inf
            peak = lowest.clamp(min=torch.finfo(self._dtype).min)
            nothing = {"peak": peak, "key": lowest, "likely": lowest, "id": at(facts.ids, self._index)}
            return dict.fromkeys(names, zero) | nothing
        found = dict[str, Tensor]()
        if "key" in names:
            found["key"], found["place"] = self._largest(z, facts.activation.logit_scale)
        if "id" in names:
            found["id"] = at(facts.ids, self._index)
        if self._place is not None:
            z_y = z.gather(1, self._place)[:, 0] if self._exact is None else self._exact
            found["target"] = self._here(z_y.to(self._dtype))
        x = self._activated()
        quick = z.is_cpu and facts.plain and "target" in names and "below" not in names and self._columns is None
        if quick and z.shape[1] >= LEAST_CLASSES:
            found["peak"], found["rest"] = self._refer_quickly(x)
        else:
            peak = x.amax(-1).clamp_(min=torch.finfo(self._dtype).min)
            found["peak"] = peak if self._invalid is None else peak.masked_fill(self._invalid, torch.nan)
            self._put(self._exponentiate(x, found["peak"], space.keeps), 0.0)
            found["rest"] = self._sum(self._e)
        if "row_weight" in names:
            found["row_weight"] = self._target_weight()
        if "squares" in names:
            squares = self._sum(self._e.square())
            found["squares"] = squares if self._factor is None else squares * self._factor.square()
        if space.keeps:
            self._fold_distances(found)
        return found

    def gradient(self, made: Coefficients) -> None:
        """Write the gradient with respect to the logits (R, C), whose memory may be that of the logits."""
        grad, e, alpha, beta = self._grad, self._e, made.alpha, made.beta
        assert grad is not None
        if e is None:
            e = self._exponentiate(self._activated(), made.peak, beta is not None)
        if self._factor is not None:
            alpha, beta = alpha * self._factor, None if beta is None else beta * self._factor
        g = grad if grad.dtype == self._dtype and self._columns is None else e
        if beta is None:
            torch.mul(e, alpha[:, None], out=g)
        else:
            torch.mul(e, self._away.clamp_(min=_LOWEST).mul_(beta[:, None]).add_(alpha[:, None]), out=g)
        if made.delta is not None:
            weight = self._facts.class_weight
            g.sub_(made.delta[:, None] if weight is None else made.delta[:, None] * weight)
        if made.share is not None:
            given, share = self._shares()
            g.addcmul_(share, made.share[:, None], value=-1)
            if made.given is not None:
                g.addcmul_(given, made.given[:, None], value=-1)
        if self._slope is not None:
            g.mul_(self._slope)
        if made.at_target is not None:
            self._put(g, made.at_target[:, None])
        if made.zero is not None:
            g.masked_fill_(made.zero[:, None], 0)
        if self._columns is not None:
            # Entries that are no class add 0 to class 0.
            grad.zero_().scatter_add_(1, self._columns, g.masked_fill_(self._outside, 0).to(grad.dtype))
            if made.invalid is not None:
                grad.masked_fill_(made.invalid[:, None], torch.nan)
        elif g is not grad:
            grad.copy_(g)

    def _activated(self, buffer: str = "x") -> Tensor:
        """Return x (R, C): the logits themselves if they are x, otherwise in a buffer."""
        z, given = self._z, self._facts.activation
        if self._facts.plain and z.dtype == self._dtype and self._exact is None and self._outside is None:
            return z
        x = self._buffer(buffer).copy_(z)
        if self._exact is not None:
            self._put(x, self._exact[:, None].to(self._dtype))
        if not self._facts.plain:
            if given.temperature is not None:
                given = given._replace(temperature=at(given.temperature, self._index)[:, None])
            self._slope = activate(x, given, None if self._grad is None else partial(self._buffer, "slope"))
        return x if self._outside is None else x.masked_fill_(self._outside, -torch.inf)

    def _exponentiate(self, x: Tensor, peak: Tensor, keeps: bool) -> Tensor:
        """Set e^(x - peak) and return it; `keeps`: also set x - peak."""
        away = torch.sub(x, peak[:, None], out=self._buffer("x"))
        self._away = away if keeps else None
        e: Tensor = self._buffer("e") if keeps else away
        self._e = e
        self._space.exponentials(away, e)
        return e

    def _refer_quickly(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Set e and the factor that it lacks, and x - peak if it is needed; return peak and rest."""
        highest, keeps = x[:, :_FIRST].amax(-1), self._space.keeps
        size = highest.abs()
        reference = highest.where((size >= _NEAR) & (size < torch.inf), 0)
        e = self._e = self._buffer("e") if keeps or x is self._z else x
        self._space.exponentials(torch.sub(x, reference[:, None], out=e) if bool(reference.any()) else x, e)
        own, rest = self._split(e, slice(None))
        total = own + rest
        smallest, largest = total.aminmax()
        if not (smallest > 0 and largest < _LARGEST_SUM):
            limit = torch.where(reference == 0, _LARGEST_EXACT_SUM, _LARGEST_SUM)
            far = ((total > 0) & (total < limit)).logical_not_().nonzero()[:, 0]
            if len(far):
                again = (self._activated("again") if e is x else x)[far]
                # An infinite or NaN logit makes a row's results NaN.
                reference[far] = largest_x = again.amax(-1).clamp_(min=torch.finfo(self._dtype).min)
                again.sub_(largest_x[:, None]).exp_()
                own[far], rest[far] = self._split(again, far)
                e[far], total[far] = again, own[far] + rest[far]
        peak = total.log().add_(reference).clamp_(min=torch.finfo(self._dtype).min)
        self._factor = (reference - peak).exp_()
        if keeps:
            self._away = torch.sub(x, peak[:, None], out=self._buffer("x"))
        return peak, rest * self._factor

    def _split(self, e: Tensor, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's e and the sum of the others, of some rows; set the target's e to 0."""
        place = self._place[rows]
        own = e.gather(1, place)
        if self._owned is None:
            e.scatter_(1, place, 0.0)
        else:
            owned = self._owned[rows]
            e.scatter_(1, place, own.masked_fill(owned, 0))
            own.masked_fill_(~owned, 0)
        return own[:, 0], row_sum(e)

    def _fold_distances(self, found: dict[str, Tensor]) -> None:
        """Add the sums that contain x - peak."""
        names, away, outside, peak = self._space.names, self._away, self._outside, found["peak"]
        if "deficit" in names:
            # The mean is a small difference of the peak and this sum: in float64 the sum adds no error of its own.
            deficit = away if outside is None else away.masked_fill(outside, 0)
            found["deficit"] = -deficit.sum(-1, dtype=torch.float64).to(self._dtype)
            whole = torch.full_like(peak, away.shape[1])
            found["counted"] = whole if outside is None else whole - outside.sum(-1)
        self._put(away, 0.0)
        if "below" in names:
            weight = self._facts.class_weight
            found["below"] = -self._sum(away if weight is None else times(weight, away))
            every = torch.full_like(peak, away.shape[1]) if weight is None else weight.sum()
            found["weights"] = every - self._target_weight()
        if "cost" in names:
            given, share = self._shares()
            found["cost"], found["mass"] = -self._sum(times(share, away)), self._sum(share)
            if "surprise" in names:
                found["surprise"], found["given"] = -self._sum(times(given, away)), self._sum(given)
            if "likely" in names:
                found["likely"], found["truth"] = self._largest(given, 1)
        if "mixed" in names:
            mixed = self._sum(away.clamp_(min=_LOWEST).mul_(self._e))
            found["mixed"] = mixed if self._factor is None else mixed * self._factor

    def _here(self, values: Tensor) -> Tensor:
        """Return values (R,) of targets, and 0 for targets that are not among these classes."""
        return values if self._owned is None else values.masked_fill(~self._owned[:, 0], 0)

    def _target_weight(self) -> Tensor:
        """Return w_y, (R,), and 0 for targets that are not among these classes."""
        weight, place = self._facts.class_weight, self._place[:, 0]
        return self._here(torch.ones_like(place, dtype=self._dtype) if weight is None else weight[place])

    def _shares(self) -> tuple[Tensor, Tensor]:
        """Return the target probabilities q and the shares w q' of each class in the loss, (R, C) both."""
        if self._held is None:
            setting, weight = self._space.setting, self._facts.class_weight
            smoothing = setting.call.options.label_smoothing
            given = share = self._space.given(self._index).to(self._dtype)
            if smooths(smoothing):
                share = given * (1 - smoothing) + smoothing / setting.vocabulary
            self._held = given, share if weight is None else share * weight
        held: tuple[Tensor, Tensor] = self._held
        return held

    def _largest(self, values: Tensor, scale: Any) -> tuple[Tensor, Tensor]:
        """Return the largest of values (R, C), in the order of scale * values, and the first class that has it.

        NaN is the largest number. Without a logit above -inf in its support, the prediction of a row is class 0.
        """
        if isinstance(scale, Tensor) or scale <= 0:
            order = torch.as_tensor(scale, device=values.device).sign()
            values = torch.where(order == 0, 0, values * order)
        if self._columns is None:
            key, place = values.max(-1)
            return key.to(self._dtype), place + self._offset
        key, place = values.masked_fill(self._outside, -torch.inf).max(-1)
        place = self._columns.gather(1, place[:, None])[:, 0] + self._offset
        return key.to(self._dtype), place.masked_fill(key == -torch.inf, 0)

    def _put(self, values: Tensor, other: Tensor | float) -> None:
        """Replace the target's value in rows whose target is among these classes."""
        if self._place is None:
            return
        if self._owned is not None:
            other = torch.where(self._owned, other, values.gather(1, self._place))
        values.scatter_(1, self._place, other)

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over classes. Sums over supports do not show by rounding how long other rows' supports are."""
        if self._columns is not None and values.is_cpu:
            return values.sum(-1, dtype=torch.float64).to(values.dtype)
        return row_sum(values)

    def _buffer(self, name: str) -> Tensor:
        """Return memory (R, C) for x or e; that of the gradient is in the cache when it is written."""
        grad, z = self._grad, self._z
        if name != "x" or grad is None or grad.dtype != self._dtype or self._columns is not None:
            return self._space.buffer(name, z)
        return grad if grad.data_ptr() != z.data_ptr() else self._space.buffer(name, z)
