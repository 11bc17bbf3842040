"""Facts: the data of each row that does not depend on logits, such as target, support, row weight and gradient factor.

The activation is x = softcap * tanh(logit_scale * z / softcap) / temperature. Slopes are 1 - tanh^2; the constant
factor logit_scale / temperature of dx/dz is part of the coefficients of a row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Part, Setting, Upstream, wide
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.memory import cast
from xent.core.arrays import dtype_name
from xent.core.call import Activation, Allowed, Classes, Probabilities, Shards, TopK, array_of
from xent.core.spec import mass_tolerance

__all__ = [
    "Exponentials",
    "Facts",
    "Index",
    "Support",
    "activate",
    "at",
    "check_targets",
    "divided",
    "impossible",
    "index_of",
    "slope",
    "times",
    "tolerance",
    "weights_of",
]

Index = slice | Tensor | None
"""Rows of the call: a slice, indices (R,) int64, or None for all."""

_NO_UPSTREAM = Upstream()
_LOWEST = {torch.float32: -87.0, torch.float64: -708.0}  # smaller arguments have results that are not normal numbers
_FLUSHED = {torch.float32: 1.7e-38, torch.float64: 3.4e-308}  # a little more than the exponentials of these
_PERIOD = 32  # blocks from one check to the next
_SMALL_BLOCK = 2**16  # elements: the slow function takes little of the time of smaller blocks


class Facts:
    """The N rows of a call in its order; floats in the accumulation dtype."""

    target: Tensor | None = None
    """(N,) int64 in [0, V); ignored and invalid rows have some valid class. None for targets that are no classes."""
    ids: Tensor | None = None
    """(N,) int64: the target as given."""
    support: "Support | None" = None
    ignored: Tensor | None = None
    """(N,) bool: rows without a target; None if it is known that there are none."""
    invalid: Tensor | None = None
    """(N,) bool: rows with a target that is no class, whose loss and gradient are NaN; None if there are none."""
    dead: Tensor | None = None
    """(N,) bool: rows whose loss and gradient are exactly 0; None if it is known that there are none."""
    class_weight: Tensor | None = None
    """(C,) of this rank's classes."""
    divisor: Any = None
    """The divisor of "mean", a number or 0-d; None for the other reductions."""
    deferred: Tensor | None = None
    """0-d: what the gradients of a narrow call still have to be multiplied by."""
    upstream = _NO_UPSTREAM
    """The upstream gradients of the statistics, (N,) each."""

    def __init__(self, setting: Setting) -> None:
        """Gather the facts of all rows of a call."""
        call, dtype = setting.call, wide(setting.compute)
        target, options = call.target, call.options
        self.activation = scale, softcap, temperature = call.activation
        self.plain = softcap is None and temperature is None and not isinstance(scale, Tensor) and scale == 1
        """Whether x is known to equal z."""
        weight = None if options.sample_weight is None else options.sample_weight.to(dtype)
        if options.weight is not None:
            self.class_weight = options.weight.to(dtype)
        if isinstance(target, (Classes, Allowed)):
            self._read_classes(target, setting)
        elif isinstance(target, Probabilities):
            self.ignored = None if target.order is None else target.order < 0
        elif weight is not None:
            self.ignored = weight == 0
        if isinstance(target, TopK):
            wrong = impossible(target, setting, self.ignored)
            self.invalid = None if looks_at_targets(setting.device) else wrong
        self._weigh(setting, weight, dtype)
        if setting.upstream is not None:
            self._receive(setting.upstream, dtype)

    def _read_classes(self, target: Classes | Allowed, setting: Setting) -> None:
        """Set ids, target, ignored, invalid and support."""
        vocabulary, ignore_index = setting.vocabulary, setting.call.options.ignore_index
        self.ids = self.target = ids = cast(target.ids, torch.int64)
        checked = looks_at_targets(ids.device)
        if not checked or not check_targets(ids, vocabulary, ignore_index):
            self.ignored = outside = ids == ignore_index
            if not checked:
                self.invalid = ((ids < 0) | (ids >= vocabulary)) & ~outside
                outside = outside | self.invalid
            self.target = ids.masked_fill(outside, 0)
        if isinstance(target, Allowed):
            self.support = Support(target, vocabulary)
            if target.broken is not None:
                broken = target.broken if self.ignored is None else target.broken & ~self.ignored
                self.invalid = broken.expand(len(ids)) if self.invalid is None else self.invalid | broken

    def _weigh(self, setting: Setting, weight: Tensor | None, dtype: torch.dtype) -> None:
        """Set weight, divisor, dead, scale and deferred."""
        options, count, narrow, invalid = setting.call.options, setting.count, setting.narrow, self.invalid
        if weight is None and (self.ignored is not None or invalid is not None or narrow):
            weight = torch.ones(count, dtype=dtype, device=setting.device)
        if weight is not None and self.ignored is not None:
            weight = weight.masked_fill(self.ignored, 0)
        mean, divisor, whole = options.reduction == "mean", options.normalizer, weight
        if self.class_weight is not None and self.target is not None and (narrow or (mean and divisor is None)):
            of_rows = weights_of(self.class_weight, self.target, setting.call.shards)
            whole = of_rows if weight is None else weight * of_rows
        if mean:
            if divisor is None:
                valid = whole if whole is None or invalid is None else whole.masked_fill(invalid, 0)
                divisor = float(count) if valid is None else valid.sum()
            if isinstance(divisor, Tensor):  # a number if the host knows it without waiting
                divisor = float(divisor) if divisor.is_cpu else divisor.to(dtype)
            self.divisor = divisor
        dead = None if weight is None else weight == 0
        if isinstance(self.divisor, Tensor) or self.divisor == 0:
            none = torch.ones(count, dtype=torch.bool, device=setting.device) & (self.divisor == 0)
            dead = none if dead is None else dead | none
        if dead is not None and not (dead.is_cpu and not bool(dead.any())):
            self.dead = dead if invalid is None else dead & ~invalid
        if weight is not None and invalid is not None:
            weight = weight.masked_fill(invalid, torch.nan)
        self.weight = weight
        """(N,) a_i; NaN for invalid rows; None if it is known that all are 1."""
        self.scale: Any
        """The factor of the gradient: a_i, divided by the divisor, times the upstream gradient. (N,), 0-d or a number.
        """
        if narrow:
            # With 1/D, float16 gradients would underflow before the loss scale is multiplied in, and with large row
            # weights they could overflow. So the stored gradients have row factors of at most 1.
            assert weight is not None
            assert whole is not None
            size = whole.abs().nan_to_num().amax() if count else weight.new_ones(())
            size = torch.where(size == 0, 1, size)
            self.scale, self.deferred = weight / size, divided(size, self.divisor)
        else:
            self.scale = divided(1.0 if weight is None else weight, self.divisor)

    def _receive(self, upstream: Upstream, dtype: torch.dtype) -> None:
        """Multiply the upstream gradient of the loss into the scale; set those of the statistics."""
        self.scale = 0.0 if upstream.loss is None else self.scale * upstream.loss.to(dtype)
        if any(one is not None for one in upstream[1:]):
            # Rows with weight 0 in the loss still have statistics, which have gradients.
            if self.dead is not None and isinstance(self.scale, Tensor):
                self.scale = self.scale.expand(len(self.dead)).masked_fill(self.dead, 0)
            self.dead = self.ignored
            given = [None if one is None else one.to(dtype) for one in upstream[1:]]
            if self.invalid is not None:
                given = [None if one is None else one.masked_fill(self.invalid, torch.nan) for one in given]
            self.upstream = Upstream(None, *given)


class Support:
    """The classes that a sampler allowed for each row, as rows of equal length, so that work does not grow with V."""

    def __init__(self, allowed: Allowed, vocabulary: int) -> None:
        self._vocabulary, self._checked = vocabulary, allowed.broken is None
        self._classes, most = allowed.classes, len(allowed.classes)
        # Invalid offsets must not cause reads out of bounds.
        self._begin = allowed.begin.to(torch.int64).clamp(0, most)
        self._length = (allowed.end.to(torch.int64).clamp(0, most) - self._begin).clamp(min=0)
        self.longest = max(int(self._length.max()), 1) if len(self._length) else 1
        """The most classes of a row. On an accelerator the host waits for it."""

    def of(self, index: Index) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the classes of some rows, (R, L) int64 in rising order, whether an entry is one, and invalid rows.

        Entries that are no class hold V. Rows (R,) with a class outside [0, V) are invalid; None if it was checked.
        """
        begin, length = at(self._begin, index), at(self._length, index)
        steps = torch.arange(self.longest, device=begin.device)
        valid = steps < length[:, None]
        if not len(self._classes):
            return valid.to(torch.int64) + self._vocabulary, valid, None
        places = (begin[:, None] + steps).clamp(max=len(self._classes) - 1)
        classes = self._classes[places].to(torch.int64)
        invalid = None
        if not self._checked:
            wrong = ((classes < 0) | (classes >= self._vocabulary)) & valid
            invalid, valid = wrong.any(-1), valid & ~wrong
        classes = classes.masked_fill(~valid, self._vocabulary).sort(-1).values
        return classes, classes < self._vocabulary, invalid


def activate(x: Tensor, activation: Activation, room: Callable[[], Tensor] | None = None) -> Tensor | None:
    """Replace logits by x, in place. With `room` for it, return 1 - tanh^2, or None without a softcap.

    A temperature has the shape of `x`, or 1 in the place of the classes.
    """
    scale, cap, temperature = activation
    if isinstance(scale, Tensor) or scale != 1:
        x.mul_(scale)
    made = None
    if cap is not None:
        x.div_(cap).tanh_()
        made = None if room is None else torch.mul(x, x, out=room()).neg_().add_(1)
        x.mul_(cap)
    if temperature is not None:
        x.div_(temperature)
    return made


def slope(logits: Tensor, activation: Activation) -> Tensor:
    """Return 1 - tanh^2 = 4 t / (1 + t)^2 with t = e^(-2 |s z / k|), without cancellation, where there is a softcap.

    A slope from tanh or x would be mostly rounding error where |tanh| is near 1.
    """
    t = (logits * activation.logit_scale).div_(activation.softcap).abs_().mul_(-2).exp_()
    made: Tensor = 4 * t / (1 + t).square()
    return made


def index_of(part: Part, start: int, stop: int, count: int) -> Index:
    """Return the rows [start, stop) of a part, of a call of `count` rows."""
    if part.rows is not None:
        return part.rows if stop - start == len(part.rows) else part.rows[start:stop]
    return None if stop - start == count else slice(part.start + start, part.start + stop)


def at(values: Any, index: Index) -> Any:
    """Return the values (N, ...) of some rows. Numbers and 0-d tensors are for all rows."""
    return values if index is None or not isinstance(values, Tensor) or not values.dim() else values[index]


def times(weights: Any, values: Tensor) -> Tensor:
    """Return weights * values, and 0 where the weight is 0, even if the value is infinite."""
    if isinstance(weights, Tensor):
        return (weights * values).masked_fill(weights == 0, 0)
    return torch.zeros_like(values) if weights == 0 else values if weights == 1 else values * weights


def divided(values: Any, divisor: Any) -> Any:
    """Return values / divisor, and 0 where the divisor is 0; None divides by 1. A reciprocal could overflow."""
    if divisor is None:
        return values
    if not isinstance(divisor, Tensor):
        return values / divisor if divisor else values * 0
    return torch.where(divisor == 0, 0, values / divisor)


def weights_of(weight: Tensor, ids: Tensor, shards: Shards | None) -> Tensor:
    """Return the class weight of each target, (N,), which in shards one rank has; 0 for targets that are no class."""
    local = ids if shards is None else ids - (shards.first or 0)
    here = (local >= 0) & (local < len(weight))
    found = weight.new_zeros(ids.shape)
    if len(weight):
        found = weight[torch.where(here, local, 0)].masked_fill(~here, 0)
    if shards is not None:
        from xent.backends.torch.shards.collectives import add_up

        found = add_up(found, shards.group).land()
    return found


def check_targets(ids: Tensor, vocabulary: int, ignore_index: int) -> bool:
    """Raise IndexError for the first invalid target (N,) int64. Return whether all targets are known to be classes."""
    if not ids.numel():
        return True
    low, high = map(int, torch.aminmax(ids))
    if low >= 0 and high < vocabulary:
        return not low <= ignore_index <= high
    wrong = ((ids < 0) | (ids >= vocabulary)) & (ids != ignore_index)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise IndexError(
            f"target[{place}] is {int(ids[place])}; classes are 0 to {vocabulary - 1}, or ignore_index={ignore_index}"
        )
    return False


def tolerance(teacher: TopK) -> float:
    """Return how far rounding may raise the sum of probabilities above 1."""
    return mass_tolerance(dtype_name(teacher.log_probs))


def impossible(teacher: TopK, setting: Setting, ignored: Tensor | None) -> Tensor:
    """Return the rows (N,) of a top-k teacher with invalid values, but for ignored ones.

    Raise an error if values may be read.
    """
    ids, log_q = teacher.ids.to(torch.int64), teacher.log_probs.to(wide(setting.compute))
    known = log_q != -torch.inf
    outside = known & ((ids < 0) | (ids >= setting.vocabulary))
    # Padding entries get distinct negative numbers.
    numbered = torch.where(known, ids, -1 - torch.arange(ids.shape[1], device=ids.device))
    ordered = numbered.sort(-1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    mass = log_q.exp().sum(-1)
    empty = (mass == 0) & (teacher.tail == "renormalize")
    wrong: Tensor = outside.any(-1) | repeated | empty | ~(mass <= 1 + tolerance(teacher))
    wrong = wrong if ignored is None else wrong & ~ignored
    if looks_at_targets(wrong.device) and bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        position = torch.unravel_index(torch.tensor(row), array_of(setting.call).shape[:-1])
        name = f"of row {[int(place) for place in position]}"
        if bool(outside[row].any()):
            found = int(ids[row][outside[row]][0])
            raise IndexError(f"teacher.ids {name} holds {found}; classes are 0 to {setting.vocabulary - 1}")
        if bool(repeated[row]):
            raise ValueError(f"teacher.ids {name} holds a class more than once")
        if bool(empty[row]):
            raise ValueError(f"teacher.log_probs {name} have no mass that could be renormalised")
        raise ValueError(
            f"teacher.log_probs {name} have a mass of {float(mass[row]):.6g}, more than 1 by more than rounding"
        )
    return wrong


class Exponentials:
    """exp for the blocks of one call, without the slow ones. On a CPU, results below the normal numbers may become 0.

    PyTorch's CPU function takes 10 to 170 times as long below e^-87.
    """

    def __init__(self) -> None:
        self._blocks = 0
        self._flushes = False

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write exp(x) to `out`, which may be x."""
        if not x.is_cpu or x.numel() < _SMALL_BLOCK:
            torch.exp(x, out=out)
            return
        if self._flushes:
            torch.clamp(x, min=_LOWEST[x.dtype], out=out).exp_()
            torch.threshold_(out, _FLUSHED[x.dtype], 0)
        else:
            torch.exp(x, out=out)
        if self._blocks % _PERIOD == 0:
            # The first row stands for the blocks that follow: classes are masked in many rows or in few.
            self._flushes = bool(out[0].amin() < _FLUSHED[x.dtype])
        self._blocks += 1
