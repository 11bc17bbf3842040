"""What is known of the rows of a call without their logits: targets, weights, and factors of the gradient."""

from copy import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.contract import Part, Setting, Upstream, smooths, wide
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.refusals import check_targets
from xent.core.call import Allowed, Classes, Probabilities, Shards, TopK, array_of, tolerance
from xent.core.spec import Scalar
from xent.core.validate import check_top_k, invalid_top_k, outside

__all__ = [
    "Facts",
    "Index",
    "at",
    "impossible",
    "index_of",
    "masked",
    "nonempty",
    "options_of_float16",
    "tolerance",
    "weights_of",
]

Index = slice | Tensor
"""Rows of the call: a slice, or indices (R,) int64."""

_LEAST_SCALE = 2.0**-60  # of logits: with a smaller one, float16 logits and their gradient are 0

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
    divisor: Scalar = 1
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
        call, dtype, count, upstream = setting.call, wide(setting.compute), setting.count, setting.upstream
        target, options, (scale, softcap, temperature) = call.target, call.options, call.activation
        self.setting, self.activation, self.dtype, self.names = setting, call.activation, dtype, setting.columns
        self.rooms: dict[str, Tensor] = {}
        """Memory that all blocks of rows share."""
        self.index: Index = slice(0, count)
        """The place of these rows in the call."""
        self.x_is_z = softcap is temperature is None and not isinstance(scale, Tensor) and scale == 1
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
            self.invalid = nonempty(impossible(target, setting, weight == 0))
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
        self.scale: Tensor = weight
        """(N,), the factor of the gradient: a_i, divided by the divisor, times the upstream gradient."""
        if divisor is not count:
            self.scale = self.weight / cast(Any, divisor) if mean else self.weight
            self.excluded = nonempty(self.scale == 0)
        elif mean:
            self.scale = torch.full_like(weight, 1 / count)
        if setting.in_float16:
            # With 1/D, float16 gradients would underflow before the loss scale is multiplied in, and with large weights
            # or scales they could overflow. So they are stored without 1/D, divided by a bound of their row factors.
            others, slope = options_of_float16(setting, self.class_weight)
            size = F.pad((whole.abs() + others * weight.abs()).nan_to_num(), (0, 1)).amax() * slope
            size = torch.where(size == 0, 1, size)
            self.scale, self.deferred = self.weight / size, size / self.divisor
        if upstream is not None:
            self.scale = torch.zeros_like(self.scale) if upstream.loss is None else self.scale * upstream.loss.to(dtype)
            of_stats = upstream._replace(loss=None)
            if any(gradient is not None for gradient in of_stats):
                # Rows with weight 0 in the loss still have statistics, which have gradients.
                self.scale, self.excluded = masked(self.scale, self.excluded, 0), self.ignored
                self.upstream = Upstream(
                    *[
                        None if gradient is None else masked(gradient.to(dtype), self.invalid, torch.nan)
                        for gradient in of_stats
                    ]
                )

    def rows(self, index: Index) -> "Facts":
        """Return the facts of some rows of the call."""
        if isinstance(index, slice) and index.stop - index.start == self.setting.count:
            return self
        selected = copy(self)
        selected.index, selected.upstream = index, Upstream(*[at(gradient, index) for gradient in self.upstream])
        selected.activation = self.activation._replace(temperature=at(self.activation.temperature, index))
        for name in _OF_ROWS:
            setattr(selected, name, at(getattr(self, name), index))
        return selected

    def invalidate(self, index: Index, wrong: Tensor) -> None:
        """Make loss and gradient NaN in those of some rows of the call that are `wrong`, (R,) bool."""
        whole = torch.zeros(self.setting.count, dtype=torch.bool, device=wrong.device)
        whole[index] = wrong
        self.invalid = whole if self.invalid is None else self.invalid | whole
        self.weight, self.scale = (array.masked_fill(whole, torch.nan) for array in (self.weight, self.scale))
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
        self.ignored, invalid = nonempty(ids == ignore_index), clamped != ids
        if isinstance(target, Allowed):
            # Invalid offsets must not cause reads out of bounds.
            classes, most = target.classes.to(torch.int64), len(target.classes)
            begin, end = (offsets.to(torch.int64).clamp(0, most) for offsets in (target.begin, target.end))
            self.classes, self.begin, self.end = classes, begin, end
            self.longest = int((end - begin).max()) if len(ids) else 0
            before = F.pad(outside(classes, vocabulary).cumsum(0), (1, 0))
            invalid |= before[end] > before[begin]
            if target.broken is not None:
                invalid |= target.broken
        self.invalid = nonempty(masked(invalid, self.ignored, False))
        if self.invalid is not None and looks_at_targets(ids.device):
            check_targets(ids, ignore_index, vocabulary)

    def outside(self, first: int, width: int) -> Tensor:
        """Return which of the `width` classes from `first` on are not in the support of each row, (N, C)."""
        classes, begin, end = cast(Any, (self.classes, self.begin, self.end))
        places = begin[:, None] + torch.arange(self.longest, device=begin.device)
        local = classes[places.clamp(max=len(classes) - 1)] - first
        local = local.masked_fill((places >= end[:, None]) | outside(local, width), width)
        mask = torch.ones(len(local), width + 1, dtype=torch.bool, device=local.device)
        return mask.scatter_(1, local, False)[:, :width]


def index_of(part: Part, start: int, stop: int) -> Index:
    """Return the rows [start, stop) of a part."""
    return slice(part.start + start, part.start + stop) if part.rows is None else part.rows[start:stop]


def at(array: Any, index: Index) -> Any:
    """Return the values (N, ...) of some rows; None for None."""
    return None if array is None else array[index]


def masked(array: Tensor, mask: Tensor | None, fill: float) -> Tensor:
    """Return the values with `fill` in places of a mask; None for a mask of no places."""
    return array if mask is None else array.masked_fill(mask, fill)


def nonempty(mask: Tensor) -> Tensor | None:
    """Return a mask, or None if the host sees that it has no places."""
    return None if mask.is_cpu and not bool(mask.any()) else mask


def weights_of(weight: Tensor, ids: Tensor, shards: Shards | None) -> Tensor:
    """Return the class weight of each target, (N,), which in shards one rank has; 0 for targets that are no class."""
    local = ids if shards is None else ids - (shards.first or 0)
    gathered = F.pad(weight, (0, 1))[local.masked_fill(outside(local, len(weight)), len(weight))]
    if shards is not None:
        from xent.backends.torch.shards.collectives import add_up

        gathered = add_up(gathered, shards.group).wait()
    return gathered


def options_of_float16(setting: Setting, class_weight: Tensor | None) -> tuple[Scalar, Scalar]:
    """Return o and s, numbers or 0-d: s a_i (w_y + o) is the size of a row's gradient, without 1/D.

    o is for label smoothing, class probabilities and z-loss, s for the logit scale. lse is not known yet: with 4 zeta
    for 2 zeta lse, a gradient is at most lse / 2 times that size, and float16 logits are below 2^16.
    """
    options, target, scale = setting.call.options, setting.call.target, setting.call.activation.logit_scale
    others = 4 * options.z_loss
    smoothing: Scalar = 1 if isinstance(target, Probabilities) else options.label_smoothing
    if class_weight is not None and smooths(smoothing):
        heaviest = F.pad(class_weight.abs(), (0, 1)).amax()
        if setting.call.shards is not None:
            from xent.backends.torch.shards.collectives import add_up

            heaviest = add_up(heaviest, setting.call.shards.group).wait()  # an upper bound
        others = others + smoothing * heaviest
    size = scale.abs().clamp(min=_LEAST_SCALE) if isinstance(scale, Tensor) else max(abs(scale), _LEAST_SCALE)
    return others, size


def impossible(teacher: TopK, setting: Setting, ignored: Tensor) -> Tensor:
    """Return the rows (N,) of a top-k teacher with invalid values, but for ignored ones.

    Raise an error if values may be read.
    """
    ids, log_q = teacher.ids.to(torch.int64), teacher.log_probs.to(wide(setting.compute))
    if looks_at_targets(ids.device):
        shape = (*array_of(setting.call).shape[:-1], ids.shape[1])
        arrays = [array.reshape(shape).cpu().numpy() for array in (ids, log_q)]
        used = ~ignored.view(shape[:-1]).cpu().numpy()
        check_top_k(arrays[0], arrays[1], used, teacher, setting.vocabulary)
        return torch.zeros_like(ignored)
    ids = ids.masked_fill(outside(ids, setting.vocabulary), setting.vocabulary)
    # Padding entries get distinct negative numbers.
    ordered = torch.where(log_q == -torch.inf, -1 - torch.arange(ids.shape[1], device=ids.device), ids).sort(-1).values
    invalid: Tensor = invalid_top_k(ordered, log_q.exp().sum(-1), teacher, setting.vocabulary) & ~ignored
    return invalid
