"""Facts: the data of each row that does not depend on logits, such as target, row weight and gradient factor."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.job import Upstream
from xent.backends.torch.options import Options
from xent.backends.torch.recorder import is_recording
from xent.backends.torch.rows import Rows, cast, shifted
from xent.backends.torch.support import Support, check_support, support_of
from xent.core.spec import LARGEST, LossSpec

__all__ = ["Facts", "accumulation_dtype", "bend_of", "check_targets", "divisor_of", "gather_facts"]

_FEW = 32  # numbers, whose range Python finds in less time than an operation


@dataclass(eq=False, slots=True)  # not frozen: a frozen dataclass takes several microseconds longer to make
class Facts:
    """N rows, V classes; tensors are on the logits' device, floats in the accumulation dtype."""

    spec: LossSpec
    vocabulary: int
    target: Tensor | None
    """(N,) int64 in [0, V); ignored and invalid rows have some valid class. None for class probabilities."""
    probabilities: Rows | None
    probability_rows: Tensor | None
    """(N,) int64, the index of each row in `probabilities`; None if it is the row's own index."""
    ignored: Tensor | None
    """(N,) bool: rows without a target; None if it is known that there are none."""
    dead: Tensor | None
    """(N,) bool: rows whose loss and gradient are exactly 0; None if it is known that there are none."""
    invalid: Tensor | None
    """(N,) bool: rows with a target outside [0, V), whose loss and gradient are NaN; None if there are none."""
    given_weight: Tensor | None
    """(N,) a_i; None if it is known that all are 1."""
    scale: Tensor
    """(N,) gradient factor: a_i, divided by the divisor for "mean", times the upstream gradient if it is known."""
    deferred: Tensor | None
    """0-d factor of the gradient that the backward pass multiplies in, so that float16 gradients do not underflow."""
    divisor: Tensor | float | None
    """The divisor of "mean", a 0-d tensor if the host does not know it; None for the other reductions."""
    class_weight: Tensor | None
    """(V,)"""
    class_weight_total: Any
    """sum_c w_c."""
    bend: Tensor | None
    """(N, 2) logit_scale and softcap (0: none) of each row; None if the numbers of the spec are for all rows."""
    support: Support | None
    """The classes that a sampler allowed for each row; None for all classes."""
    upstream: Upstream | None
    """The upstream gradients of the statistics, (N,) each; None if there are none."""

    @property
    def weight(self) -> Tensor:
        """(N,) a_i."""
        return torch.ones_like(self.scale) if self.given_weight is None else self.given_weight

    @property
    def idle(self) -> Tensor | None:
        """(N,) bool: rows that can be skipped, None if it is known that there are none.

        Every row with a target has statistics, even if its loss and gradient are 0.
        """
        return self.ignored if self.spec.stats or self.dead is None else self.dead

    def select(self, rows: Tensor) -> "Facts":
        """Return the facts of these rows, given as indices (M,) int64."""
        mapped = None
        dead = None if self.dead is None else self.dead[rows]
        if dead is not None and dead.device.type == "cpu" and not bool(dead.any()):
            dead = None
        if self.probabilities is not None:
            mapped = rows if self.probability_rows is None else self.probability_rows[rows]
        return replace(
            self,
            target=None if self.target is None else self.target[rows],
            probability_rows=mapped,
            ignored=None if self.ignored is None else self.ignored[rows],
            dead=dead,
            invalid=None if self.invalid is None else self.invalid[rows],
            given_weight=None if self.given_weight is None else self.given_weight[rows],
            scale=self.scale[rows],
            bend=None if self.bend is None else self.bend[rows],
            support=None if self.support is None else self.support.select(rows),
            upstream=_each(self.upstream, lambda values: values[rows]),
        )

    def probability_block(self, start: int, stop: int) -> Tensor:
        """Return the target probabilities of rows [start, stop), (R, V), in the caller's dtype."""
        assert self.probabilities is not None
        if self.probability_rows is None:
            return self.probabilities.block(start, stop)
        return self.probabilities.take(self.probability_rows[start:stop])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, of per-row results and of the loss."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gather_facts(
    options: Options,
    vocabulary: int,
    dtype: torch.dtype,
    shift: int = 0,
    upstream: Upstream | None = None,
    narrow: bool = False,
    weigh: Callable[[Tensor], Tensor] | None = None,
) -> Facts:
    """Return the facts of all rows of a call whose logits have `dtype`.

    Row t has the target and sample weight t + `shift` along the last axis of the target. `narrow`: scale gradients so
    that they stay in float16's range. `weigh` returns the class weights (N,) of targets (N,) if the options do not hold
    the weights of all classes.
    """
    spec, acc = options.spec, accumulation_dtype(dtype)
    device, on_cpu = options.target.device, options.target.is_cpu
    has_probabilities = options.target.is_floating_point()
    shape = options.target.shape[:-1] if has_probabilities else options.target.shape
    count, invalid, ignored = shape.numel(), None, None
    if has_probabilities:
        target, probabilities = None, Rows(options.target)
        source = None if not shift else shifted(torch.arange(count, device=device).view(shape), shift, 0)
        if shift:
            ignored = ~shifted(torch.ones(shape, dtype=torch.bool, device=device), shift, False).flatten()
        row_weight = None
    else:
        probabilities, source = None, None
        all_classes = check_targets(options, vocabulary, shift, first=upstream is None)
        target = shifted(cast(options.target, torch.int64), shift, spec.ignore_index).flatten()
        if shift or not all_classes:
            ignored = target == spec.ignore_index
            outside = ignored
            if not looks_at_targets(device):
                invalid = ((target < 0) | (target >= vocabulary)) & ~ignored
                outside = ignored | invalid
            target = target.masked_fill(outside, 0)
        if weigh is not None:
            row_weight = weigh(target)
        else:
            row_weight = None if options.weight is None else options.weight.to(acc)[target]
    support = None
    if options.support_ids is not None and options.support_offsets is not None:
        looked = looks_at_targets(device)
        support = support_of(options.support_ids, options.support_offsets, shape, shift, vocabulary, looked)
        if support.broken is not None:
            broken = support.broken if ignored is None else support.broken & ~ignored
            invalid = broken if invalid is None else invalid | broken
    if shift and options.temperature is not None:
        options = options._replace(temperature=shifted(options.temperature, shift, 1))
    bend = bend_of(options, acc)
    weight: Tensor | None = None
    if options.sample_weight is not None:
        weight = shifted(options.sample_weight.to(acc), shift, 0).flatten()
    elif ignored is not None or invalid is not None:
        weight = torch.ones(count, dtype=acc, device=device)
    if weight is not None and ignored is not None:
        weight = weight.masked_fill(ignored, 0)
    divisor = _divisor(options, weight, row_weight, invalid, count, acc) if spec.reduction == "mean" else None
    dead: Tensor | None = None
    inverse: Any = 1.0
    if isinstance(divisor, Tensor):
        dead, inverse = (divisor == 0).repeat(count), torch.where(divisor == 0, 0, 1 / divisor)
    elif divisor == 0:
        dead, inverse = torch.ones(count, dtype=torch.bool, device=device), 0.0
    elif divisor is not None:
        inverse = 1 / divisor
    if weight is not None:
        dead = weight == 0 if dead is None else dead | (weight == 0)
        if on_cpu and not bool(dead.any()):
            dead = None
    elif narrow or isinstance(divisor, Tensor):
        weight = torch.ones(count, dtype=acc, device=device)
    if weight is not None and invalid is not None:
        weight = weight.masked_fill(invalid, torch.nan)
        dead = None if dead is None else dead & ~invalid
    deferred = None
    if weight is None:
        scale = torch.full((count,), inverse, dtype=acc, device=device)
    elif narrow:
        # With 1/D, float16 gradients would underflow before the loss scale is multiplied in, and with large row
        # weights they could overflow. So the stored gradients have row factors of at most 1.
        largest = (weight if row_weight is None else weight * row_weight).abs().nan_to_num()
        size = largest.amax() if len(largest) else weight.new_ones(())
        size = torch.where(size == 0, 1, size)
        scale, deferred = weight / size, inverse * size
    else:
        scale = weight if divisor is None else weight * inverse
    statistics = None
    if upstream is not None:
        scale = torch.zeros_like(scale) if upstream.loss is None else scale * upstream.loss.to(acc).flatten()
        if any(given is not None for given in upstream[1:]):
            # Rows with weight 0 in the loss still have statistics, which have gradients.
            scale, dead = scale if dead is None else scale.masked_fill(dead, 0), ignored
            statistics = _each(upstream._replace(loss=None), partial(_of_rows, acc, invalid))
    class_weight = None if options.weight is None else options.weight.to(acc)
    return Facts(
        spec=spec,
        vocabulary=vocabulary,
        target=target,
        probabilities=probabilities,
        probability_rows=None if source is None else source.flatten(),
        ignored=ignored,
        dead=dead,
        invalid=invalid,
        given_weight=weight,
        scale=scale,
        deferred=deferred,
        divisor=divisor,
        class_weight=class_weight,
        class_weight_total=vocabulary if class_weight is None else class_weight.sum(),
        bend=bend,
        support=support,
        upstream=statistics,
    )


def divisor_of(options: Options) -> tuple[float | None, Tensor | None]:
    """Return the `normalizer` as (number, None) or (None, 0-d tensor on the target's device), or (None, None)."""
    given = options.normalizer
    if not isinstance(given, Tensor):
        return given, None
    if given.device.type == "cpu" != options.target.device.type:
        # Copying the tensor between devices would synchronise; a number is passed as an argument of the launch.
        return float(given), None
    return None, given


def bend_of(options: Options, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Return logit_scale and softcap of each position of the target; None if numbers are given for all positions.

    The result is (N, 2) in `dtype`, with softcap 0 for none. It is contiguous, or has row stride 0 without a
    temperature per row. Entry i belongs to position i of the target, like that of `sample_weight`: row t uses entry
    t + shift. x = k tanh(s z / k) / T equals k' tanh(s' z / k') with k' = k / T and s' = s / T. Both are NaN for a
    temperature that is not > 0.
    """
    target, spec, temperature = options.target, options.spec, options.temperature
    if temperature is None and options.logit_scale is None and options.softcap is None:
        return None
    made = torch.empty(1 if temperature is None else temperature.numel(), 2, dtype=dtype, device=target.device)
    _fill(made[:, 0], spec.logit_scale if options.logit_scale is None else options.logit_scale)
    cap = options.softcap
    _fill(made[:, 1], (spec.softcap or 0.0) if cap is None else cap.to(dtype).clamp(max=LARGEST))
    if temperature is None:
        return made.expand((target.shape[:-1] if target.is_floating_point() else target.shape).numel(), 2)
    divisor = temperature.to(dtype).flatten()
    divisor = divisor.masked_fill(~(divisor > 0), torch.nan).clamp(max=LARGEST)
    return made.div_(divisor[:, None])


def _fill(place: Tensor, value: Tensor | float) -> None:
    """Write one value to all of `place`. The assignment `place[...] = number` could not be recorded."""
    if isinstance(value, Tensor):
        place.copy_(value)
    else:
        place.fill_(value)


def check_targets(options: Options, vocabulary: int, shift: int, first: bool = True) -> bool:
    """Raise IndexError for the first invalid target that a row uses, if values may be read on this device.

    Temperature (ValueError) and support (ValueError, IndexError) are checked too, in the `first` pass only. Return
    whether all targets that a row uses are known to be classes other than ignore_index.
    """
    if not looks_at_targets(options.target.device):
        return False
    if first and options.temperature is not None:
        _check_temperature(options.temperature, shift)
    if first and options.support_ids is not None:
        check_support(options.support_ids, options.support_offsets, vocabulary)
    used, ignore_index = cast(options.target, torch.int64), options.spec.ignore_index
    if shift:
        used = used[..., shift:]
    if not used.numel():
        return True
    if used.numel() <= _FEW and not is_recording():  # the recorder does not see `tolist`
        numbers = used.flatten().tolist()
        low, high = min(numbers), max(numbers)
    else:
        low, high = map(int, torch.aminmax(used))
    if low >= 0 and high < vocabulary:
        return not low <= ignore_index <= high
    wrong = ((used < 0) | (used >= vocabulary)) & (used != ignore_index)
    if bool(wrong.any()):
        position = wrong.nonzero()[0].tolist()
        found = int(used[tuple(position)])
        if shift:
            position[-1] += shift
        raise IndexError(
            f"target{position or ''} is {found}; classes are 0 to {vocabulary - 1}, or ignore_index={ignore_index}"
        )
    return False


def _check_temperature(temperature: Tensor, shift: int) -> None:
    wrong = ~(temperature > 0)
    if shift:
        wrong[..., :shift] = False
    if bool(wrong.any()):
        position = wrong.nonzero()[0].tolist()
        where = f" at {position}" if position else ""
        raise ValueError(f"temperature must be > 0 in every row, got {float(temperature[tuple(position)])}{where}")


def _each(upstream: Upstream | None, function: Callable[[Tensor], Tensor]) -> Upstream | None:
    """Apply the function to each upstream gradient that is not None."""
    return None if upstream is None else Upstream(*(None if one is None else function(one) for one in upstream))


def _of_rows(dtype: torch.dtype, invalid: Tensor | None, upstream: Tensor) -> Tensor:
    """Return the upstream gradient of a statistic, (N,); NaN for rows whose target is not a class."""
    rows = upstream.to(dtype).flatten()
    return rows if invalid is None else rows.masked_fill(invalid, torch.nan)


def _product(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the product of two weights (N,); None stands for 1 in all rows."""
    if one is None or other is None:
        return other if one is None else one
    return one * other


def _divisor(
    options: Options,
    weight: Tensor | None,
    row_weight: Tensor | None,
    invalid: Tensor | None,
    count: int,
    dtype: torch.dtype,
) -> Tensor | float:
    """Return the divisor of "mean" over `count` rows, as a number if the host knows it without synchronising."""
    number, tensor = divisor_of(options)
    if number is not None:
        return number
    if tensor is None:
        parts = _product(weight, row_weight)
        if parts is None:
            return float(count)
        tensor = (parts if invalid is None else parts.masked_fill(invalid, 0)).sum()
    return float(tensor) if tensor.is_cpu else tensor.to(dtype)
