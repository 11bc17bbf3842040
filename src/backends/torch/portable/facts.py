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
    divisor: Tensor | None = None
    """0-d: the divisor of "mean"; None for the other reductions."""
    dead: Tensor | None = None
    """(N,) bool: rows whose loss and gradient are exactly 0; None if it is known that there are none."""
    deferred: Tensor | None = None
    """0-d: what the gradients of a narrow call still have to be multiplied by."""
    upstream = Upstream()
    """The upstream gradients of the statistics, (N,) each."""

    def __init__(self, setting: Setting) -> None:
        """Gather the facts of all rows of a call."""
        call, dtype, count, device = setting.call, wide(setting.compute), setting.count, setting.device
        target, options = call.target, call.options
        self.setting, self.activation, self.dtype, self.names = setting, call.activation, dtype, columns(setting)
        self.keeps = not {"mixed", "below", "deficit", "cost", "squares"}.isdisjoint(self.names)
        """Whether rows have sums beside `rest`. They have no influence on the bits of other results."""
        self.rooms, self.results = dict[str, Tensor](), dict[str, Tensor]()
        """Memory that all blocks of rows share, and recorded results (N,)."""
        scale, softcap, temperature = call.activation
        self.plain = softcap is None and temperature is None and not isinstance(scale, Tensor) and scale == 1
        """Whether x is known to equal z."""
        weight = options.sample_weight
        weight = torch.ones(count, dtype=dtype, device=device) if weight is None else weight.to(dtype)
        if options.weight is not None:
            self.class_weight = options.weight.to(dtype)
        self.ignored = self.invalid = torch.zeros(count, dtype=torch.bool, device=device)
        """(N,) bool: rows without a target, and with a target that is no class, whose loss and gradient are NaN."""
        if isinstance(target, (Classes, Allowed)):
            self._read_classes(target)
        elif not isinstance(target, Probabilities):
            self.ignored = weight == 0
        elif target.order is not None:
            self.ignored = target.order < 0
        if isinstance(target, TopK):
            self.invalid = impossible(target, setting, self.ignored)
        self._weigh(weight.masked_fill(self.ignored, 0))
        if setting.upstream is not None:
            self._receive(setting.upstream, dtype)

    def _read_classes(self, target: Classes | Allowed) -> None:
        """Set ids, target, ignored, invalid and support."""
        vocabulary, ignore_index = self.setting.vocabulary, self.setting.call.options.ignore_index
        self.ids = ids = cast(target.ids, torch.int64)
        if looks_at_targets(ids.device):
            check_targets(ids, ignore_index, vocabulary)
        self.ignored = ids == ignore_index
        self.invalid = ((ids < 0) | (ids >= vocabulary)) & ~self.ignored
        self.target = ids.masked_fill(self.ignored | self.invalid, 0)
        if isinstance(target, Allowed):
            # Invalid offsets must not cause reads out of bounds.
            classes, most = target.classes.to(torch.int64), len(target.classes)
            begin, end = (values.to(torch.int64).clamp(0, most) for values in (target.begin, target.end))
            self.support, self.longest = Allowed(ids, classes, begin, end), int((end - begin).max()) if len(ids) else 0
            before = F.pad(((classes < 0) | (classes >= vocabulary)).cumsum(0), (1, 0))
            wrong = before[end] > before[begin]
            wrong = wrong if target.broken is None else wrong | target.broken
            self.invalid = self.invalid | (wrong & ~self.ignored)

    def outside(self, index: Index, first: int, width: int) -> Tensor:
        """Return which of the `width` classes from `first` on are not in the support of rows, (R, C)."""
        assert self.support is not None
        _, classes, begin, end, _ = self.support
        places = at(begin, index)[:, None] + torch.arange(self.longest, device=begin.device)
        local = classes[places.clamp(max=len(classes) - 1)] - first
        local = local.masked_fill((places >= at(end, index)[:, None]) | (local < 0) | (local >= width), width)
        outside = torch.ones(len(local), width + 1, dtype=torch.bool, device=local.device)
        return outside.scatter_(1, local, False)[:, :width]

    def _weigh(self, weight: Tensor) -> None:
        """Set weight, divisor, dead, scale and deferred."""
        setting, invalid, whole = self.setting, self.invalid, weight
        mean, divisor = setting.call.options.reduction == "mean", setting.call.options.normalizer
        if self.class_weight is not None and self.target is not None and (setting.narrow or (mean and divisor is None)):
            whole = weight * weights_of(self.class_weight, self.target, setting.call.shards)
        if mean:
            divisor = whole.masked_fill(invalid, 0).sum() if divisor is None else divisor
            self.divisor = weight.new_zeros(()) + divisor
        dead = (weight == 0) | (self.divisor == 0)
        if not (dead.is_cpu and not bool(dead.any())):
            self.dead = dead & ~invalid
        self.weight = weight = weight.masked_fill(invalid, torch.nan)
        """(N,) a_i; NaN for invalid rows."""
        self.scale: Tensor = divided(weight, self.divisor)
        """(N,), the factor of the gradient: a_i, divided by the divisor, times the upstream gradient."""
        if setting.narrow:
            # With 1/D, float16 gradients would underflow before the loss scale is multiplied in, and with large row
            # weights they could overflow. So the stored gradients have row factors of at most 1.
            size = whole.abs().nan_to_num().amax() if setting.count else weight.new_ones(())
            size = torch.where(size == 0, 1, size)
            self.scale, self.deferred = weight / size, divided(size, self.divisor)

    def _receive(self, upstream: Upstream, dtype: torch.dtype) -> None:
        """Multiply the upstream gradient of the loss into the scale; set those of the statistics."""
        self.scale = torch.zeros_like(self.scale) if upstream.loss is None else self.scale * upstream.loss.to(dtype)
        if any(one is not None for one in upstream[1:]):
            # Rows with weight 0 in the loss still have statistics, which have gradients.
            if self.dead is not None:
                self.scale = self.scale.masked_fill(self.dead, 0)
            self.dead = self.ignored
            given = [
                None if one is None else one.to(dtype).masked_fill(self.invalid, torch.nan) for one in upstream[1:]
            ]
            self.upstream = Upstream(None, *given)


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
    return None if values is None else values[index]


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
