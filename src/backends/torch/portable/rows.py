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
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import smooths
from xent.backends.torch.memory import row_sum
from xent.backends.torch.portable.activation import activate, sign
from xent.backends.torch.portable.facts import Index, at, times
from xent.backends.torch.portable.workspace import Coefficients, Workspace

__all__ = ["LogitRows"]

LEAST_CLASSES = 4096  # with fewer, the time of operations per row exceeds that of exponentials
_FIRST = 64  # classes whose largest logit becomes the reference
_NEAR = 32  # references of a smaller magnitude become 0
_LARGEST_SUM = 2.0**30  # so x is at most 21 above the reference, and the rounding of x - R at most 1e-6
_LARGEST_EXACT_SUM = 2.0**60  # for the reference 0, where nothing is rounded
_LOWEST = -1000.0  # e^x is 0 far above; 0 times infinity would be NaN


class LogitRows:
    """R rows of logits (R, C) of this rank's classes from `first` on."""

    def __init__(
        self,
        space: Workspace,
        logits: Tensor,
        index: Index,
        first: int,
        target_logits: Tensor | None,
        grad: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """`target_logits` (R,) replace those of the targets. `grad` (R, C): memory for the gradient if it is wanted."""
        self.space, self.facts, self.setting, self.index = space, space.facts, space.setting, index
        self.z, self.first, self.dtype, self._exact, self._grad = logits, first, dtype, target_logits, grad
        self._classes = slice(first, first + logits.shape[1])
        self._offset = self.setting.first + first
        self._columns: Tensor | None = None
        self._outside: Tensor | None = None
        self._owned: Tensor | None = None
        self._invalid: Tensor | None = None
        self._place: Tensor | None = None
        self._factor: Tensor | None = None
        self._e: Tensor | None = None
        self._away: Tensor | None = None
        self._slope: Tensor | None = None
        self._held: tuple[Tensor, Tensor] | None = None
        if self.facts.target is not None and logits.shape[1]:
            self._locate(at(self.facts.target, index)[:, None])

    def _locate(self, target: Tensor) -> None:
        """Find the targets (R, 1) among these classes, and with a support gather the logits of its classes."""
        width = self.z.shape[1]
        if self.facts.support is None:
            self._place = target
            if width < self.setting.vocabulary:
                local = target - self._offset
                self._owned, self._place = (local >= 0) & (local < width), local.clamp(0, width - 1)
            return
        classes, valid, self._invalid = self.facts.support.of(self.index)
        local = classes - self._offset
        valid &= (local >= 0) & (local < width)
        self._columns, self._outside = local.masked_fill_(~valid, 0), ~valid
        self.z = self.z.gather(1, self._columns)
        here = (classes == target) & valid
        self._owned, self._place = here.any(-1, keepdim=True), here.to(torch.uint8).argmax(-1, keepdim=True)

    def fold(self) -> dict[str, Tensor]:
        """Return the sums of these rows by name, (R,) each; classes are int64."""
        names, found = self.space.names, dict[str, Tensor]()
        if not self.z.shape[1]:
            return self._nothing()
        if "key" in names:
            found["key"], found["place"] = self._largest(self.z, sign(self.facts.activation))
        if self._place is not None:
            z_y = self.z.gather(1, self._place)[:, 0] if self._exact is None else self._exact
            z_y = z_y.to(self.dtype)
            found["target"] = z_y if self._owned is None else z_y.masked_fill(~self._owned[:, 0], 0)
            if "id" in names:
                found["id"] = at(self.facts.ids, self.index)
        x = self._activated()
        others = {"mixed", "below", "deficit", "cost"}.intersection(names)
        if self.space.quick and x.shape[1] >= LEAST_CLASSES:
            found["peak"], found["rest"] = self._refer_quickly(x, bool(others))
            if others:
                self._away = torch.sub(x, found["peak"][:, None], out=self._buffer("x"))
        else:
            peak = x.amax(-1).clamp_(min=torch.finfo(self.dtype).min)
            peak = found["peak"] = peak if self._invalid is None else peak.masked_fill(self._invalid, torch.nan)
            e = self._exponentiate(x, peak, bool(others))
            self._put(e, 0.0)
            found["rest"] = self._sum(e)
        if "row_weight" in names:
            found["row_weight"] = self._target_weight()
        if "squares" in names:
            assert self._e is not None
            squares = self._sum(self._e.square())
            found["squares"] = squares if self._factor is None else squares * self._factor.square()
        if others:
            self._fold_distances(found)
        return found

    def gradient(self, made: Coefficients) -> None:
        """Write the gradient with respect to the logits (R, C), whose memory may be that of the logits."""
        grad = self._grad
        assert grad is not None
        e, alpha, beta = self._e, made.alpha, made.beta
        if e is None:
            e = self._exponentiate(self._activated(), made.peak, beta is not None)
        if self._factor is not None:
            alpha, beta = alpha * self._factor, None if beta is None else beta * self._factor
        g = grad if grad.dtype == self.dtype and self._columns is None else e
        if beta is None:
            torch.mul(e, alpha[:, None], out=g)
        else:
            assert self._away is not None
            torch.mul(e, self._away.clamp_(min=_LOWEST).mul_(beta[:, None]).add_(alpha[:, None]), out=g)
        if made.delta is not None:
            weight = self.facts.class_weight
            g.sub_(made.delta[:, None] if weight is None else made.delta[:, None] * weight[self._classes])
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
        if self._columns is not None and self._outside is not None:
            # Entries that are no class add 0 to class 0.
            grad.zero_().scatter_add_(1, self._columns, g.masked_fill_(self._outside, 0).to(grad.dtype))
            if made.invalid is not None:
                grad.masked_fill_(made.invalid[:, None], torch.nan)
        elif g is not grad:
            grad.copy_(g)

    def _activated(self, buffer: str = "x") -> Tensor:
        """Return x (R, C): the logits themselves if they are x, otherwise in a buffer."""
        z = self.z
        if self.facts.plain and z.dtype == self.dtype and self._exact is None and self._outside is None:
            return z
        x = self._buffer(buffer).copy_(z)
        if self._exact is not None:
            self._put(x, self._exact[:, None].to(self.dtype))
        if not self.facts.plain:
            given = self.facts.activation
            if given.temperature is not None:
                given = given._replace(temperature=at(given.temperature, self.index)[:, None])
            self._slope = activate(x, given, None if self._grad is None else partial(self._buffer, "slope"))
        return x if self._outside is None else x.masked_fill_(self._outside, -torch.inf)

    def _exponentiate(self, x: Tensor, peak: Tensor, keeps: bool) -> Tensor:
        """Set e^(x - peak) and return it; `keeps`: also set x - peak."""
        away = torch.sub(x, peak[:, None], out=self._buffer("x"))
        self._away = away if keeps else None
        e = self._e = self._buffer("e") if keeps else away
        self.space.exponentials(away, e)
        return e

    def _refer_quickly(self, x: Tensor, keeps: bool) -> tuple[Tensor, Tensor]:
        """Set e and the factor that it lacks; return peak and rest. `keeps`: x is used again."""
        highest = x[:, :_FIRST].amax(-1)
        size = highest.abs()
        reference = highest.where((size >= _NEAR) & (size < torch.inf), 0)
        e = self._e = self._buffer("e") if keeps or x is self.z else x
        self.space.exponentials(torch.sub(x, reference[:, None], out=e) if bool(reference.any()) else x, e)
        own, rest = self._split(e, slice(None))
        total = own + rest
        smallest, largest = total.aminmax()
        if not (smallest > 0 and largest < _LARGEST_SUM):
            limit = torch.where(reference == 0, _LARGEST_EXACT_SUM, _LARGEST_SUM)
            far = ((total > 0) & (total < limit)).logical_not_().nonzero()[:, 0]
            if len(far):
                again = (self._activated("again") if e is x else x)[far]
                # An infinite or NaN logit makes a row's results NaN.
                reference[far] = largest_x = again.amax(-1).clamp_(min=torch.finfo(self.dtype).min)
                again.sub_(largest_x[:, None]).exp_()
                own[far], rest[far] = self._split(again, far)
                e[far], total[far] = again, own[far] + rest[far]
        peak = total.log().add_(reference).clamp_(min=torch.finfo(self.dtype).min)
        self._factor = (reference - peak).exp_()
        return peak, rest * self._factor

    def _split(self, e: Tensor, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's e and the sum of the others, of some rows; set the target's e to 0."""
        assert self._place is not None
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
        names, away, peak = self.space.names, self._away, found["peak"]
        assert away is not None
        assert self._e is not None
        if "deficit" in names:
            found["deficit"] = -self._sum(away if self._outside is None else away.masked_fill(self._outside, 0))
            if self._outside is None:
                found["counted"] = torch.full_like(peak, away.shape[1])
            else:
                found["counted"] = (~self._outside).sum(-1).to(self.dtype)
        self._put(away, 0.0)
        if "below" in names:
            weight = self.facts.class_weight
            if weight is None:
                found["below"], whole = -self._sum(away), torch.full_like(peak, away.shape[1])
            else:
                weight = weight[self._classes]
                found["below"], whole = -self._sum(times(weight, away)), weight.sum()
            found["weights"] = whole - self._target_weight()
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

    def _target_weight(self) -> Any:
        """Return w_y, (R,) or a number, and 0 for targets that are not among these classes."""
        assert self._place is not None
        weight = self.facts.class_weight
        if weight is None:
            return 1.0 if self._owned is None else self._owned[:, 0].to(self.dtype)
        found = weight[self._classes][self._place[:, 0]]
        return found if self._owned is None else found.masked_fill(~self._owned[:, 0], 0)

    def _shares(self) -> tuple[Tensor, Tensor]:
        """Return the target probabilities q and the shares w q' of each class in the loss, (R, C) both."""
        if self._held is None:
            smoothing, weight = self.setting.call.options.label_smoothing, self.facts.class_weight
            given = share = self.space.given(self.index)[:, self._classes].to(self.dtype)
            if smooths(smoothing):
                share = given * (1 - smoothing) + smoothing / self.setting.vocabulary
            self._held = given, share if weight is None else share * weight[self._classes]
        return self._held

    def _largest(self, values: Tensor, order: Any) -> tuple[Tensor, Tensor]:
        """Return the largest of order * values (R, C) and the first class that has it. NaN is the largest number."""
        if isinstance(order, Tensor):
            values = torch.where(order == 0, 0, values * order)
        elif order != 1:
            values = values * order if order else torch.zeros_like(values)
        if self._columns is None or values.shape != self._columns.shape:
            key, local = values.max(-1)
            return key.to(self.dtype), local + self._offset
        assert self._outside is not None
        key = values.masked_fill(self._outside, -torch.inf).amax(-1)
        ties = (values == key[:, None]) & ~self._outside & key.isfinite()[:, None]
        # The classes of a row are in rising order. Without a finite logit the prediction is class 0.
        place = self._columns.gather(1, ties.to(torch.uint8).argmax(-1, keepdim=True))[:, 0] + self._offset
        return key.to(self.dtype), place.masked_fill(~ties.any(-1), 0)

    def _put(self, values: Tensor, other: Tensor | float) -> None:
        """Replace the target's value in rows whose target is among these classes."""
        if self._place is None:
            return
        if self._owned is None:
            values.scatter_(1, self._place, other)
        else:
            present = values.gather(1, self._place)
            values.scatter_(1, self._place, torch.where(self._owned, other, present))

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over classes. Sums over supports do not show by rounding how long other rows' supports are."""
        if self._columns is not None and values.is_cpu:
            return values.sum(-1, dtype=torch.float64).to(values.dtype)
        return row_sum(values)

    def _nothing(self) -> dict[str, Tensor]:
        """Return the sums over no class."""
        zero = torch.zeros(self.z.shape[0], dtype=self.dtype, device=self.z.device)
        found = dict.fromkeys(self.space.names, zero)
        lowest = torch.full_like(zero, -torch.inf)
        found["peak"] = lowest.clamp(min=torch.finfo(self.dtype).min)
        found |= {name: lowest for name in ("key", "likely") if name in found}
        found |= {name: zero.to(torch.int64) for name in ("place", "truth") if name in found}
        if "id" in found:
            found["id"] = at(self.facts.ids, self.index)
        return found

    def _buffer(self, name: str) -> Tensor:
        """Return memory (R, C) for x or e; that of the gradient is in the cache when it is written."""
        grad = self._grad
        if name != "x" or grad is None or grad.dtype != self.dtype or self._columns is not None:
            return self.space.buffer(name, self.z, self.dtype)
        return grad if grad.data_ptr() != self.z.data_ptr() else self.space.buffer(name, self.z, self.dtype)
