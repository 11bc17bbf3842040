"""Facts: the data of each row that does not depend on logits, such as target, row weight and gradient factor."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Part, Setting, Upstream, wide
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.memory import cast
from xent.backends.torch.portable.activation import identity
from xent.backends.torch.portable.support import Support
from xent.backends.torch.portable.top_k import impossible
from xent.core.call import Activation, Allowed, Classes, Options, Probabilities, TopK

__all__ = ["Facts", "Index", "at", "check_targets", "index_of", "times"]

Index = slice | Tensor | None
"""Rows of the call: a slice, indices (R,) int64, or None for all."""

_FEW = 32  # numbers, whose range Python finds in less time than an operation


_NO_UPSTREAM = Upstream()


@dataclass(eq=False, slots=True)
class Facts:
    """The N rows of a call in its order; floats in the accumulation dtype."""

    activation: Activation
    plain: bool
    """Whether x is known to equal z."""
    target: Tensor | None = None
    """(N,) int64 in [0, V); ignored and invalid rows have some valid class. None for targets that are no classes."""
    ids: Tensor | None = None
    """(N,) int64: the target as given."""
    support: Support | None = None
    ignored: Tensor | None = None
    """(N,) bool: rows without a target; None if it is known that there are none."""
    invalid: Tensor | None = None
    """(N,) bool: rows with a target that is no class, whose loss and gradient are NaN; None if there are none."""
    dead: Tensor | None = None
    """(N,) bool: rows whose loss and gradient are exactly 0; None if it is known that there are none."""
    weight: Tensor | None = None
    """(N,) a_i; NaN for invalid rows; None if it is known that all are 1."""
    class_weight: Tensor | None = None
    """(C,) of this rank's classes."""
    divisor: Any = None
    """The divisor of "mean", a number or 0-d; None for the other reductions."""
    scale: Any = 1.0
    """The factor of the gradient: a_i, divided by the divisor, times the upstream gradient. (N,), 0-d or a number."""
    deferred: Tensor | None = None
    """0-d: what the gradients of a narrow call still have to be multiplied by."""
    upstream: Upstream = _NO_UPSTREAM
    """The upstream gradients of the statistics, (N,) each."""

    @classmethod
    def of(cls, setting: Setting) -> "Facts":
        """Gather the facts of all rows of a call."""
        call, target, dtype = setting.call, setting.call.target, wide(setting.compute)
        options = call.options
        made = cls(call.activation, identity(call.activation))
        if options.weight is not None:
            made.class_weight = options.weight.to(dtype)
        if options.sample_weight is not None:
            made.weight = options.sample_weight.to(dtype)
        if isinstance(target, (Classes, Allowed)):
            made._read_classes(target, setting.vocabulary, options.ignore_index)
        elif isinstance(target, Probabilities):
            made.ignored = None if target.order is None else target.order < 0
        elif made.weight is not None:
            made.ignored = made.weight == 0
        if isinstance(target, TopK):
            wrong = impossible(target, setting, made.ignored)
            made.invalid = None if looks_at_targets(setting.device) else wrong
        made._weigh(setting, dtype)
        return made

    def _read_classes(self, target: Classes | Allowed, vocabulary: int, ignore_index: int) -> None:
        """Set ids, target, ignored and invalid."""
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

    def _weigh(self, setting: Setting, dtype: torch.dtype) -> None:
        """Set weight, divisor, scale, deferred, dead and upstream."""
        options, device, count = setting.call.options, setting.device, setting.count
        weight = self.weight
        if weight is None and (self.ignored is not None or self.invalid is not None or setting.narrow):
            weight = torch.ones(count, dtype=dtype, device=device)
        if weight is not None and self.ignored is not None:
            weight = weight.masked_fill(self.ignored, 0)
        averages = options.reduction == "mean" and options.normalizer is None
        whole = weight
        if self.class_weight is not None and self.target is not None and (averages or setting.narrow):
            of_rows = self._target_weights(setting)
            whole = of_rows if weight is None else weight * of_rows
        if options.reduction == "mean":
            self.divisor = self._divisor(options, whole, count, dtype)
        self.dead = self._zero_rows(weight, count, device)
        if weight is not None and self.invalid is not None:
            weight = weight.masked_fill(self.invalid, torch.nan)
        self.weight, scale = weight, weight
        if setting.narrow:
            # With 1/D, float16 gradients would underflow before the loss scale is multiplied in, and with large row
            # weights they could overflow. So the stored gradients have row factors of at most 1.
            assert weight is not None
            assert whole is not None
            size = whole.abs().nan_to_num().amax() if count else weight.new_ones(())
            size = torch.where(size == 0, 1, size)
            scale, self.deferred = weight / size, _divided(size, self.divisor)
        else:
            scale = _divided(1.0 if weight is None else weight, self.divisor)
        self.scale = scale
        if setting.upstream is not None:
            self._receive(setting.upstream, dtype)

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

    def _target_weights(self, setting: Setting) -> Tensor:
        """Return the class weight of each row's target, (N,), which in shards one rank has."""
        assert self.target is not None
        assert self.class_weight is not None
        shards = setting.call.shards
        if shards is None:
            return self.class_weight[self.target]
        from xent.backends.torch.shards.collectives import add_up

        local = self.target - setting.first
        found = torch.zeros(setting.count, dtype=self.class_weight.dtype, device=setting.device)
        if setting.width:
            here = (local >= 0) & (local < setting.width)
            found = self.class_weight[local.clamp(0, setting.width - 1)].masked_fill(~here, 0)
        total: Tensor = add_up(found, shards.group).land()
        return total

    def _divisor(self, options: Options, whole: Tensor | None, count: int, dtype: torch.dtype) -> Any:
        """Return the divisor of "mean", as a number if the host knows it without waiting."""
        found = options.normalizer
        if found is None:
            if whole is None:
                return float(count)
            found = (whole if self.invalid is None else whole.masked_fill(self.invalid, 0)).sum()
        if not isinstance(found, Tensor):
            return found
        return float(found) if found.is_cpu else found.to(dtype)

    def _zero_rows(self, weight: Tensor | None, count: int, device: torch.device) -> Tensor | None:
        if not isinstance(self.divisor, Tensor) and self.divisor == 0:
            return torch.ones(count, dtype=torch.bool, device=device)
        dead = None if weight is None else weight == 0
        if isinstance(self.divisor, Tensor):
            none = (self.divisor == 0).expand(count)
            dead = none if dead is None else dead | none
        if dead is not None and dead.is_cpu and not bool(dead.any()):
            return None
        return dead if dead is None or self.invalid is None else dead & ~self.invalid

    def skippable(self, stats: bool) -> Tensor | None:
        """Return the rows (N,) of which nothing is computed, None if it is known that there are none.

        With statistics (`stats`) every row with a target is computed, even if its loss and gradient are 0.
        """
        return self.ignored if stats or self.dead is None else self.dead


def _divided(values: Any, divisor: Any) -> Any:
    """Return values / divisor, and 0 where the divisor is 0. A reciprocal could overflow."""
    if divisor is None:
        return values
    if not isinstance(divisor, Tensor):
        return values / divisor if divisor else values * 0
    return torch.where(divisor == 0, 0, values / divisor)


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


def check_targets(ids: Tensor, vocabulary: int, ignore_index: int) -> bool:
    """Raise IndexError for the first invalid target (N,) int64. Return whether all targets are known to be classes."""
    if not ids.numel():
        return True
    if ids.numel() <= _FEW:
        numbers = ids.tolist()
        low, high = min(numbers), max(numbers)
    else:
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
