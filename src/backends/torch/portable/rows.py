"""Rows of a call: what is known of them without logits, their sums over blocks of logits, and their gradients.

The activation is x = softcap * tanh(logit_scale * z / softcap) / temperature. Slopes are 1 - tanh^2; the constant
factor logit_scale / temperature of dx/dz is part of the coefficients of a row.

With a reference `peak` near the row's largest logit, a block's exponentials e^(x_c - peak) stay in memory between
`fold` and `gradient`, so that whole rows take one exponential per logit. The gradient of a logit is ::

    g_c = e^(x_c - peak) (alpha + beta (x_c - peak)) - share w_c - given q_c,  times 1 - tanh^2
    g_y = at_target in place of this, for class indices,  times 1 - tanh^2

w are the class weights, or for class probabilities the shares w' of the classes in the loss.

On a CPU a fused softmax computes the exponentials: those relative to `peak`, divided by a factor of each row. All
this depends on the row alone, not on the rows beside it.
"""

from copy import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.contract import Block, Part, Setting, Upstream, smooths, wide
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.memory import Rows, row_sum
from xent.backends.torch.refusals import check_targets
from xent.core.call import Activation, Allowed, Classes, Probabilities, Shards, TopK, array_of, dtype_name
from xent.core.spec import mass_tolerance
from xent.core.validate import check_top_k

__all__ = [
    "Facts",
    "Index",
    "LogitRows",
    "activate",
    "at",
    "impossible",
    "index_of",
    "masked",
    "options_of_float16",
    "ordered",
    "probabilities",
    "some",
    "times",
    "tolerance",
    "weights_of",
]

Index = slice | Tensor
"""Rows of the call: a slice, or indices (R,) int64."""

_FIRST = 1024  # classes whose largest logit becomes the peak
_LEAST_PART = 2.0**-16  # of the probability, which they have then: x is at most 11.1 above the peak
_LEAST_SCALE = 2.0**-60  # of logits: with a smaller one, float16 logits and their gradient are 0
_LOWEST = -1000.0  # e^x is 0 far above; 0 times infinity would be NaN

_OF_ROWS = (
    *("target", "ids", "log_probs", "begin", "end", "order"),
    *("check", "weight", "scale", "ignored", "invalid", "excluded"),
)


class Facts:
    """The N rows of a call in its order, or some of these rows; floats in the accumulation dtype."""

    target: Tensor | None = None
    """(N,) int64 in [0, V); ignored and invalid rows have some valid class. None if targets are not class indices."""
    ids: Tensor | None = None
    """(N,) int64: the target as given; (N, K) of a top-k teacher, with its log-probabilities."""
    log_probs: Tensor | None = None
    begin: Tensor | None = None
    """(N,) int64, of a support, like `end`: valid offsets into its `classes`."""
    end: Tensor | None = None
    classes: Tensor | None = None
    longest = 0
    """The most classes of a support. On an accelerator the host waits for it."""
    order: Tensor | None = None
    """(N,) int64: see `xent.core.call.Probabilities`."""
    check: Tensor | None = None
    """(N,) int64, in shards: see `xent.backends.torch.shards.checks.row_checks`."""
    class_weight: Tensor | None = None
    """(C,) of this rank's classes."""
    divisor: Any = 1
    """0-d or a number: the divisor of "mean", inf for 0; 1 for the other reductions."""
    ignored: Tensor | None = None
    """(N,) bool: rows without a target; None if it is known that there are none, as below."""
    invalid: Tensor | None = None
    """(N,) bool: rows with a target that is no class, whose loss and gradient are NaN."""
    excluded: Tensor | None = None
    """(N,) bool: rows whose loss and gradient are exactly 0."""
    deferred: Tensor | None = None
    """0-d: the remaining factor of the gradients of a call `in_float16`."""
    upstream = Upstream()
    """The upstream gradients of the statistics, (N,) each."""

    def __init__(self, setting: Setting) -> None:
        """Gather the facts of all rows of a call."""
        call, dtype, count, given = setting.call, wide(setting.compute), setting.count, setting.upstream
        target, options, (scale, softcap, temperature) = call.target, call.options, call.activation
        self.setting, self.activation, self.dtype, self.names = setting, call.activation, dtype, setting.columns
        self.rooms: dict[str, Tensor] = {}
        """Memory that all blocks of rows share."""
        self.index: Index = slice(0, count)
        """The place of these rows in the call."""
        self.plain = softcap is temperature is None and not isinstance(scale, Tensor) and scale == 1
        """Whether x is known to equal z."""
        mean, divisor, weight = options.reduction == "mean", options.normalizer, options.sample_weight
        alike = weight is divisor is None and count > 0
        weight = torch.ones(count, dtype=dtype, device=setting.device) if weight is None else weight.to(dtype)
        if isinstance(target, (Classes, Allowed)):
            self._read_classes(target)
        elif isinstance(target, Probabilities):
            self.order = target.order
            self.ignored = None if target.order is None else target.order < 0
        elif options.sample_weight is not None:
            self.ignored = weight == 0
        if isinstance(target, TopK):
            self.ids, self.log_probs = target.ids, target.log_probs
            self.invalid = some(impossible(target, setting, weight == 0))
        if self.ignored is not None:
            weight = weight.masked_fill(self.ignored, 0)
        whole = weight
        if options.weight is not None:
            self.class_weight = class_weight = options.weight.to(dtype)
            if self.target is not None and (setting.in_float16 or (mean and divisor is None)):
                alike, whole = False, weight * weights_of(class_weight, self.target, call.shards)
        if alike and self.ignored is self.invalid is None:
            divisor = count  # each row weighs 1: fewer operations
        elif mean:
            divisor = masked(whole, self.invalid, 0).sum() if divisor is None else weight.new_zeros(()) + divisor
            divisor = divisor.masked_fill(divisor == 0, torch.inf)
        if mean:
            self.divisor = divisor
        self.weight = weight if self.invalid is None else weight.masked_fill(self.invalid, torch.nan)
        """(N,) a_i; NaN for invalid rows."""
        self.scale: Tensor = self.weight / cast(Any, divisor) if mean else self.weight
        """(N,), the factor of the gradient: a_i, divided by the divisor, times the upstream gradient."""
        if divisor is not count:
            self.excluded = some(self.scale == 0)
        if setting.in_float16:
            # With 1/D, float16 gradients would underflow before the loss scale is multiplied in, and with large weights
            # or scales they could overflow. So they are stored without 1/D, divided by a bound of their row factors.
            others, slope = options_of_float16(setting, self.class_weight)
            size = F.pad((whole.abs() + others * weight.abs()).nan_to_num(), (0, 1)).amax() * slope
            size = torch.where(size == 0, 1, size)
            self.scale, self.deferred = self.weight / size, size / self.divisor
        if given is not None:
            self.scale = torch.zeros_like(self.scale) if given.loss is None else self.scale * given.loss.to(dtype)
            of_stats = given._replace(loss=None)
            if any(gradient is not None for gradient in of_stats):
                # Rows with weight 0 in the loss still have statistics, which have gradients.
                self.scale, self.excluded = masked(self.scale, self.excluded, 0), self.ignored
                self.upstream = Upstream(
                    *[None if one is None else masked(one.to(dtype), self.invalid, torch.nan) for one in of_stats]
                )

    def rows(self, index: Index) -> "Facts":
        """Return the facts of some rows of the call."""
        if isinstance(index, slice) and index.stop - index.start == self.setting.count:
            return self
        some = copy(self)
        some.index, some.upstream = index, Upstream(*[at(one, index) for one in self.upstream])
        some.activation = self.activation._replace(temperature=at(self.activation.temperature, index))
        for name in _OF_ROWS:
            setattr(some, name, at(getattr(self, name), index))
        return some

    def invalidate(self, index: Index, wrong: Tensor) -> None:
        """Make loss and gradient NaN in those of some rows of the call that are `wrong`, (R,) bool."""
        whole = torch.zeros(self.setting.count, dtype=torch.bool, device=wrong.device)
        whole[index] = wrong
        self.invalid = whole if self.invalid is None else self.invalid | whole
        self.weight, self.scale = (one.masked_fill(whole, torch.nan) for one in (self.weight, self.scale))
        for name in ("ignored", "excluded"):
            mask = getattr(self, name)
            setattr(self, name, None if mask is None else mask & ~whole)

    def _read_classes(self, target: Classes | Allowed) -> None:
        """Set ids, target, ignored, invalid and the support."""
        vocabulary, ignore_index = self.setting.vocabulary, self.setting.call.options.ignore_index
        self.ids = ids = target.ids.to(torch.int64)
        self.target = clamped = ids.clamp(0, vocabulary - 1)
        if (
            ids.is_cpu
            and isinstance(target, Classes)
            and not 0 <= ignore_index < vocabulary
            and torch.equal(clamped, ids)
        ):
            return
        self.ignored, invalid = some(ids == ignore_index), clamped != ids
        if isinstance(target, Allowed):
            # Invalid offsets must not cause reads out of bounds.
            classes, most = target.classes.to(torch.int64), len(target.classes)
            begin, end = (one.to(torch.int64).clamp(0, most) for one in (target.begin, target.end))
            self.classes, self.begin, self.end = classes, begin, end
            self.longest = int((end - begin).max()) if len(ids) else 0
            before = F.pad(((classes < 0) | (classes >= vocabulary)).cumsum(0), (1, 0))
            invalid |= before[end] > before[begin]
            if target.broken is not None:
                invalid |= target.broken
        self.invalid = some(masked(invalid, self.ignored, False))
        if self.invalid is not None and looks_at_targets(ids.device):
            check_targets(ids, ignore_index, vocabulary)

    def outside(self, first: int, width: int) -> Tensor:
        """Return which of the `width` classes from `first` on are not in the support of each row, (N, C)."""
        classes, begin, end = cast(Any, (self.classes, self.begin, self.end))
        places = begin[:, None] + torch.arange(self.longest, device=begin.device)
        local = classes[places.clamp(max=len(classes) - 1)] - first
        local = local.masked_fill((places >= end[:, None]) | (local < 0) | (local >= width), width)
        outside = torch.ones(len(local), width + 1, dtype=torch.bool, device=local.device)
        return outside.scatter_(1, local, False)[:, :width]


def activate(x: Tensor, activation: Activation, wanted: bool = False) -> Tensor | None:
    """Replace logits by x, in place. Return 1 - tanh^2 if it is `wanted`, or None without a softcap.

    x is (R,) or (R, C), a temperature (R,).
    """
    scale, cap, temperature = activation
    if isinstance(scale, Tensor) or scale != 1:
        x.mul_(scale)
    made = None
    if cap is not None:
        x.div_(cap).tanh_()
        made = x.square().neg_().add_(1) if wanted else None
        x.mul_(cap)
    if temperature is not None:
        x.div_(temperature if x.dim() == 1 else temperature[:, None])
    return made


def index_of(part: Part, start: int, stop: int) -> Index:
    """Return the rows [start, stop) of a part."""
    return slice(part.start + start, part.start + stop) if part.rows is None else part.rows[start:stop]


def at(values: Any, index: Index) -> Any:
    """Return the values (N, ...) of some rows; None for None."""
    return None if values is None else values[index]


def masked(values: Tensor, mask: Tensor | None, fill: Any) -> Tensor:
    """Return the values with `fill` in places of a mask; None for a mask of no places."""
    return values if mask is None else values.masked_fill(mask, fill)


def some(mask: Tensor) -> Tensor | None:
    """Return a mask, or None if the host sees that it has no places."""
    return None if mask.is_cpu and not bool(mask.any()) else mask


def weights_of(weight: Tensor, ids: Tensor, shards: Shards | None) -> Tensor:
    """Return the class weight of each target, (N,), which in shards one rank has; 0 for targets that are no class."""
    local = ids if shards is None else ids - (shards.first or 0)
    here = (local >= 0) & (local < len(weight))
    found = F.pad(weight, (0, 1))[torch.where(here, local, len(weight))]
    if shards is not None:
        from xent.backends.torch.shards.collectives import add_up

        found = add_up(found, shards.group).wait()
    return found


def options_of_float16(setting: Setting, class_weight: Tensor | None) -> tuple[Any, Any]:
    """Return o and s, numbers or 0-d: s a_i (w_y + o) is the size of a row's gradient, without 1/D.

    o is for label smoothing, class probabilities and z-loss, s for the logit scale. lse is not known yet: with 4 zeta
    for 2 zeta lse, a gradient is at most lse / 2 times that size, and float16 logits are below 2^16.
    """
    options, target, scale = setting.call.options, setting.call.target, setting.call.activation.logit_scale
    others = 4 * options.z_loss
    smoothing: Any = 1 if isinstance(target, Probabilities) else options.label_smoothing
    if class_weight is not None and smooths(smoothing):
        heaviest = F.pad(class_weight.abs(), (0, 1)).amax()
        if setting.call.shards is not None:
            from xent.backends.torch.shards.collectives import add_up

            heaviest = add_up(heaviest, setting.call.shards.group).wait()  # an upper bound
        others = others + smoothing * heaviest
    size = scale.abs().clamp(min=_LEAST_SCALE) if isinstance(scale, Tensor) else max(abs(scale), _LEAST_SCALE)
    return others, size


def tolerance(teacher: TopK) -> float:
    """Return how far rounding may raise the sum of probabilities above 1."""
    return mass_tolerance(dtype_name(teacher.log_probs))


def impossible(teacher: TopK, setting: Setting, ignored: Tensor) -> Tensor:
    """Return the rows (N,) of a top-k teacher with invalid values, but for ignored ones.

    Raise an error if values may be read.
    """
    ids, log_q = teacher.ids.to(torch.int64), teacher.log_probs.to(wide(setting.compute))
    if looks_at_targets(ids.device):
        shape = (*array_of(setting.call).shape[:-1], ids.shape[1])
        given = [values.reshape(shape).cpu().numpy() for values in (ids, log_q)]
        used = ~ignored.view(shape[:-1]).cpu().numpy()
        check_top_k(given[0], given[1], used, teacher.tail, dtype_name(teacher.log_probs), setting.vocabulary)
        return torch.zeros_like(ignored)
    known = log_q != -torch.inf
    outside = known & ((ids < 0) | (ids >= setting.vocabulary))
    # Padding entries get distinct negative numbers.
    ordered = torch.where(known, ids, -1 - torch.arange(ids.shape[1], device=ids.device)).sort(-1).values
    mass = log_q.exp().sum(-1)
    wrong = outside.any(-1) | (ordered[:, 1:] == ordered[:, :-1]).any(-1) | ~(mass <= 1 + tolerance(teacher))
    found: Tensor = (wrong | ((mass == 0) & (teacher.tail == "renormalize"))) & ~ignored
    return found


def ordered(z: Tensor, scale: Any) -> Tensor:
    """Return raw logits in the order of scale * z."""
    if isinstance(scale, Tensor) or scale <= 0:
        return times(torch.as_tensor(scale, device=z.device).sign(), z)
    return z


def times(weights: Any, values: Tensor) -> Tensor:
    """Return weights * values, and 0 where the weight is 0, even if the value is infinite."""
    if isinstance(weights, Tensor):
        return (weights * values).masked_fill(weights == 0, 0)
    return torch.zeros_like(values) if weights == 0 else values if weights == 1 else values * weights


def probabilities(facts: Facts) -> Tensor:
    """Return the target probabilities of rows, (R, C), in the caller's dtype."""
    values = Rows(cast(Probabilities, facts.setting.call.target).values)
    return values[facts.index if facts.order is None else facts.order.clamp(min=0)]


class LogitRows:
    """R rows of logits (R, C) of this rank's classes."""

    _place: Any = None
    """(R, 1): the column of the target. None if the targets are no classes."""
    _elsewhere: Any = None
    """(R,) bool: rows whose target is not among these classes; None if there are none."""
    _outside: Any = None
    """(R, C) bool: the classes that are not in the support of a row."""
    _e: Any = None
    """(R, C): e^(x - peak) without the target, divided by `_factor`; `_away`: x - peak; `_slope`: 1 - tanh^2."""
    _factor: Any = None
    _away: Any = None
    _slope: Any = None

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
        found: dict[str, Any] = {"peak": peak, "rest": row_sum(e)}
        if "key" in names:
            found["key"], found["place"] = self._largest(z, facts.activation.logit_scale)
        if "squares" in names:
            found["squares"] = row_sum(e.square())
        if "deficit" in names:
            # The mean is a small difference of the peak and this sum: in float64 the sum adds no error of its own.
            deficit = masked(away, outside, 0)
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
            found["target"] = z_y if self._elsewhere is None else z_y.masked_fill(self._elsewhere, 0)
            if keeps:
                self._put(away, 0.0)
            weight = facts.class_weight
            if weight is not None or "below" in names:
                w_y = torch.ones_like(peak) if weight is None else weight[place[:, 0]]
                found["row_weight"] = masked(w_y, self._elsewhere, 0)
            if "below" in names:
                found["below"] = -row_sum(times(self._shares()[1], away))
                found["weights"] = (z.shape[1] if weight is None else weight.sum()) - found["row_weight"]
        if "mixed" in names:
            found["mixed"] = row_sum(away.clamp_(min=_LOWEST).mul_(e))
        if self._factor is not None:
            for name in found.keys() & {"rest", "mixed", "squares"}:
                found[name] *= self._factor.square() if name == "squares" else self._factor
        return found

    def gradient(self, made: dict[str, Any]) -> None:
        """Write the gradient with respect to the logits (R, C), whose memory may be that of the logits."""
        grad, alpha, beta, share, given = self._grad, made["alpha"], made["beta"], made["share"], made["given"]
        assert grad is not None
        if self._e is None:
            self._exponentiate(beta is not None, made["peak"])
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
        if not facts.plain or x.dtype != facts.dtype or exact is not None or outside is not None:
            x = self._room("x").copy_(x)
            if exact is not None:
                self._put(x, exact[:, None].to(facts.dtype))
            self._slope = activate(x, facts.activation, self._grad is not None)
            if outside is not None:
                x.masked_fill_(outside, -torch.inf)
        if x.is_cpu:
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
        if keeps or not x.is_cpu:
            self._away = torch.sub(x, peak[:, None], out=self._room("x"))
        if not x.is_cpu:
            self._e = torch.exp(self._away, out=self._room("e") if keeps else self._away)
        return peak

    def _shares(self) -> Any:
        """Return the target probabilities q and the shares w q' of each class in the loss, (R, C) both.

        For class indices, return None and the class weights, (C,) or 1.
        """
        facts, given, share = self._facts, None, self._facts.class_weight
        if facts.target is None:
            given, smoothing = probabilities(facts).to(facts.dtype), facts.setting.call.options.label_smoothing
            q = given * (1 - smoothing) + smoothing / facts.setting.vocabulary if smooths(smoothing) else given
            share = q if share is None else q * share
        return given, 1 if share is None else share

    def _largest(self, values: Tensor, scale: Any) -> tuple[Tensor, Tensor]:
        """Return the largest of values (R, C), in the order of scale * values, and the first class that has it.

        NaN is the largest number. Without a logit above -inf in its support, the prediction of a row is class 0.
        """
        key, place = masked(ordered(values, scale), self._outside, -torch.inf).max(-1)
        return key.to(self._facts.dtype), place + self._facts.setting.first

    def _put(self, values: Tensor, other: Tensor | float) -> None:
        """Replace the target's value in rows whose target is among these classes."""
        if self._place is not None:
            if self._elsewhere is not None:
                other = torch.where(self._elsewhere[:, None], values.gather(1, self._place), other)
            values.scatter_(1, self._place, other)

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
        return held[name][: len(z)]
