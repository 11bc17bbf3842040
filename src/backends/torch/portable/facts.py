"""Facts: the data of each row that does not depend on logits, such as target, support, row weight and gradient factor.

The activation is x = softcap * tanh(logit_scale * z / softcap) / temperature. Slopes are 1 - tanh^2; the constant
factor logit_scale / temperature of dx/dz is part of the coefficients of a row.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.contract import Part, Setting, Upstream, columns, wide
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.memory import cast
from xent.backends.torch.refusals import check_targets
from xent.core.arrays import dtype_name
from xent.core.call import Activation, Allowed, Classes, Probabilities, Shards, TopK, array_of
from xent.core.spec import mass_tolerance
from xent.core.values import check_top_k

__all__ = [
    "Facts",
    "Index",
    "activate",
    "at",
    "divided",
    "impossible",
    "index_of",
    "masked",
    "some",
    "tolerance",
    "weights_of",
]

Index = slice | Tensor
"""Rows of the call: a slice, or indices (R,) int64."""


class Facts:
    """The N rows of a call in its order; floats in the accumulation dtype."""

    target: Tensor | None = None
    """(N,) int64 in [0, V); ignored and invalid rows have some valid class. None for targets that are no classes."""
    ids: Tensor | None = None
    """(N,) int64: the target as given."""
    support: Allowed | None = None
    """Its offsets are valid."""
    longest = 0
    """The most classes of a support. On an accelerator the host waits for it."""
    class_weight: Tensor | None = None
    """(C,) of this rank's classes."""
    divisor: Any = 1
    """0-d: the divisor of "mean", inf for 0; 1 for the other reductions."""
    ignored: Tensor | None = None
    """(N,) bool: rows without a target; None if it is known that there are none, as below."""
    invalid: Tensor | None = None
    """(N,) bool: rows with a target that is no class, whose loss and gradient are NaN."""
    dead: Tensor | None = None
    """(N,) bool: rows whose loss and gradient are exactly 0."""
    deferred: Tensor | None = None
    """0-d: what the gradients of a narrow call still have to be multiplied by."""
    upstream = Upstream()
    """The upstream gradients of the statistics, (N,) each."""

    def __init__(self, setting: Setting) -> None:
        """Gather the facts of all rows of a call."""
        call, dtype, count, device = setting.call, wide(setting.compute), setting.count, setting.device
        target, options = call.target, call.options
        self.setting, self.activation, self.dtype, self.names = setting, call.activation, dtype, columns(setting)
        self.rooms, self.results = dict[str, Tensor](), dict[str, Tensor]()
        """Memory that all blocks of rows share, and recorded results (N,)."""
        scale, softcap, temperature = call.activation
        self.plain = softcap is None and temperature is None and not isinstance(scale, Tensor) and scale == 1
        """Whether x is known to equal z."""
        weight = options.sample_weight
        weight = torch.ones(count, dtype=dtype, device=device) if weight is None else weight.to(dtype)
        if options.weight is not None:
            self.class_weight = options.weight.to(dtype)
        if isinstance(target, (Classes, Allowed)):
            self._read_classes(target)
        elif not isinstance(target, Probabilities):
            self.ignored = weight == 0
        elif target.order is not None:
            self.ignored = target.order < 0
        if isinstance(target, TopK):
            self.invalid = some(impossible(target, setting, weight == 0))
        whole = weight = masked(weight, self.ignored, 0)
        mean, divisor = options.reduction == "mean", options.normalizer
        if self.class_weight is not None and self.target is not None and (setting.narrow or (mean and divisor is None)):
            whole = weight * weights_of(self.class_weight, self.target, call.shards)
        if mean:
            divisor = masked(whole, self.invalid, 0).sum() if divisor is None else weight.new_zeros(()) + divisor
            self.divisor = divisor.masked_fill(divisor == 0, torch.inf)
        self.weight = weight = masked(weight, self.invalid, torch.nan)
        """(N,) a_i; NaN for invalid rows."""
        self.scale: Tensor = weight / self.divisor if mean else weight
        """(N,), the factor of the gradient: a_i, divided by the divisor, times the upstream gradient."""
        self.dead = some(self.scale == 0)
        if setting.narrow:
            # With 1/D, float16 gradients would underflow before the loss scale is multiplied in, and with large row
            # weights they could overflow. So the stored gradients have row factors of at most 1.
            size = whole.abs().nan_to_num().amax() if count else weight.new_ones(())
            size = torch.where(size == 0, 1, size)
            self.scale, self.deferred = weight / size, size / self.divisor
        if setting.upstream is not None:
            self._receive(setting.upstream, dtype)

    def _read_classes(self, target: Classes | Allowed) -> None:
        """Set ids, target, ignored, invalid and support."""
        vocabulary, ignore_index = self.setting.vocabulary, self.setting.call.options.ignore_index
        self.ids = ids = cast(target.ids, torch.int64)
        self.ignored = some(ids == ignore_index)
        used = masked(ids, self.ignored, 0)
        self.target = used.clamp(0, vocabulary - 1)
        invalid = self.target != used
        if isinstance(target, Allowed):
            # Invalid offsets must not cause reads out of bounds.
            classes, most = target.classes.to(torch.int64), len(target.classes)
            begin, end = (values.to(torch.int64).clamp(0, most) for values in (target.begin, target.end))
            self.support, self.longest = Allowed(ids, classes, begin, end), int((end - begin).max()) if len(ids) else 0
            before = F.pad(((classes < 0) | (classes >= vocabulary)).cumsum(0), (1, 0))
            wrong = before[end] > before[begin]
            wrong = wrong if target.broken is None else wrong | target.broken
            invalid |= masked(wrong, self.ignored, False)
        self.invalid = some(invalid)
        if self.invalid is not None and looks_at_targets(ids.device):
            check_targets(ids, ignore_index, vocabulary)

    def outside(self, index: Index, first: int, width: int) -> Tensor:
        """Return which of the `width` classes from `first` on are not in the support of rows, (R, C)."""
        assert self.support is not None
        _, classes, begin, end, _ = self.support
        places = at(begin, index)[:, None] + torch.arange(self.longest, device=begin.device)
        local = classes[places.clamp(max=len(classes) - 1)] - first
        local = local.masked_fill((places >= at(end, index)[:, None]) | (local < 0) | (local >= width), width)
        outside = torch.ones(len(local), width + 1, dtype=torch.bool, device=local.device)
        return outside.scatter_(1, local, False)[:, :width]

    def _receive(self, upstream: Upstream, dtype: torch.dtype) -> None:
        """Multiply the upstream gradient of the loss into the scale; set those of the statistics."""
        self.scale = torch.zeros_like(self.scale) if upstream.loss is None else self.scale * upstream.loss.to(dtype)
        if any(one is not None for one in upstream[1:]):
            # Rows with weight 0 in the loss still have statistics, which have gradients.
            self.scale, self.dead = masked(self.scale, self.dead, 0), self.ignored
            self.upstream = Upstream(
                None, *[None if one is None else masked(one.to(dtype), self.invalid, torch.nan) for one in upstream[1:]]
            )


def activate(x: Tensor, activation: Activation, wanted: bool = False) -> Tensor | None:
    """Replace logits by x, in place. Return 1 - tanh^2 if it is `wanted`, or None without a softcap.

    A temperature has the shape of `x`, or 1 in the place of the classes.
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
        x.div_(temperature)
    return made


def index_of(part: Part, start: int, stop: int) -> Index:
    """Return the rows [start, stop) of a part."""
    return slice(part.start + start, part.start + stop) if part.rows is None else part.rows[start:stop]


def at(values: Any, index: Index) -> Any:
    """Return the values (N, ...) of some rows; None for None."""
    if values is None or (isinstance(index, slice) and index.stop - index.start == len(values)):
        return values
    return values[index]


def masked(values: Tensor, mask: Tensor | None, fill: Any) -> Tensor:
    """Return the values with `fill` in places of a mask; None for a mask of no places."""
    return values if mask is None else values.masked_fill(mask, fill)


def some(mask: Tensor) -> Tensor | None:
    """Return a mask, or None if the host sees that it has no places."""
    return None if mask.is_cpu and not bool(mask.any()) else mask


def divided(values: Tensor, divisor: Tensor | None) -> Tensor:
    """Return values / divisor, and 0 where the divisor is 0; None divides by 1. A reciprocal could overflow."""
    return values if divisor is None else torch.where(divisor == 0, 0, values / divisor)


def weights_of(weight: Tensor, ids: Tensor, shards: Shards | None) -> Tensor:
    """Return the class weight of each target, (N,), which in shards one rank has; 0 for targets that are no class."""
    local = ids if shards is None else ids - (shards.first or 0)
    here = (local >= 0) & (local < len(weight))
    found = F.pad(weight, (0, 1))[torch.where(here, local, len(weight))]
    if shards is not None:
        from xent.backends.torch.shards.collectives import add_up

        found = add_up(found, shards.group).land()
    return found


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
