"""What the rows of one call have besides logits, in the form of kernel arguments.

Kernels read targets, weights and upstream gradients from the caller's own tensors. The divisor of a mean and the number
of rows with a target take one launch.
"""

import torch
from torch import Tensor

from xent.backends.torch.contract import CONSTANTS, Part, Setting, Upstream, smooths
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.memory import cast
from xent.backends.torch.plan import Plan
from xent.backends.torch.portable.facts import impossible, options_of_float16, weights_of
from xent.backends.torch.refusals import check_targets
from xent.backends.triton.kernels.rows_kernel import MOST_COUNTED
from xent.backends.triton.kernels.sums import divisor_kernel
from xent.backends.triton.launches import (
    Columns,
    Launch,
    Numbers,
    Results,
    Rows,
    Upstreams,
    Way,
    absent,
    alignment,
    no_rows,
    no_upstreams,
)
from xent.core.call import Allowed, Classes, Probabilities, TopK, differs
from xent.core.spec import Scalar

__all__ = ["Decisions", "Inputs", "floats_of"]

_MANY = 1024
_LARGEST_SOFTCAP = 256
_NO_LIMIT = 2**62
_DIVISOR_BLOCK = 4096  # rows


class Decisions:
    """What the steps of a plan decide once: the constants of kernels, and kernels with constants that they share."""

    def __init__(self, plan: Plan, upstream: Upstream | None) -> None:
        """`upstream`: which upstream gradients there are; None in a forward pass."""
        call = plan.call
        options, activation, target = call.options, call.activation, call.target
        of_entropy = upstream is not None and upstream.entropy
        statistics = upstream is not None and (upstream.lse or upstream.nll or of_entropy)
        self.stats = stats = options.stats if upstream is None else ()
        """The statistics that are computed."""
        self.statistics = statistics
        """Whether there are upstream gradients of statistics."""
        self.way = Way(
            capped=activation.softcap is not None,
            smoothed=smooths(options.label_smoothing) or isinstance(target, Probabilities),
            of_entropy=of_entropy,
            entropy=of_entropy or "entropy" in stats,
            squared="log_sum_sq_probs" in stats,
            averaged="mean_logit" in stats,
            predicted="predictions" in stats or "accuracy" in stats,
        )
        """What all launches of a call share."""
        self.columns = Columns(**{name: place for place, name in enumerate(plan.columns) if name in Columns._fields})
        """The columns of packed sums."""
        self.counts = "count" in stats or "accuracy" in stats
        names = () if upstream is not None else [name for name in ("loss", *stats) if name not in ("count", "rank")]
        self.recorded = [(name, torch.int64 if name == "predictions" else torch.float32) for name in names]
        """The results of rows that kernels of a forward pass record, with their dtypes."""
        # The kernel that finishes the sums of class targets is the same in both passes.
        known = options.stats if upstream is None or isinstance(target, Classes) else ()
        self.known = tuple(name for name in Results._fields if name in known)
        """The statistics whose results kernels have the sums for."""
        self.scaled = differs(activation.logit_scale, 1) or activation.temperature is not None
        if self.way.predicted:
            self.way = self.way._replace(scaled=self.scaled)
        changed = activation.softcap is not None or self.scaled
        changed = changed or differs(options.z_loss, 0) or differs(options.label_smoothing, 0)
        self.all_rows = float(bool(stats) or statistics)
        self.numbers = None if changed else Numbers(1.0, 0.0, 0.0, 0.0, 1.0, self.all_rows)
        """The numbers of the options, if these are neutral."""
        self.launches: dict[object, Launch] = {}


CONSTANTS["triton"] = Decisions


class Inputs:
    """The rows of a call: argument groups and numbers of kernels."""

    recorded = Results()
    """The memory of the results that kernels record."""

    def __init__(self, setting: Setting) -> None:
        call, upstream, decisions = setting.call, setting.upstream, setting.constants
        options, target, (scale, softcap, temperature) = call.options, call.target, call.activation
        self.setting, self.options, self.device, self.count = setting, options, setting.device, setting.count
        self.decisions, self.way, self.columns, self.stats = (
            decisions,
            decisions.way,
            decisions.columns,
            decisions.stats,
        )
        ids: Tensor | None = None
        self.ignore_index, self.limit = -1, _NO_LIMIT
        """The `rows.target` that is ignored, and the smallest one that is invalid."""
        if isinstance(target, (Classes, Allowed)):
            ids, self.ignore_index, self.limit = target.ids, options.ignore_index, setting.vocabulary
        elif isinstance(target, Probabilities):
            ids = target.order
        numbers: Tensor | None = None
        self.numbers: Numbers = decisions.numbers
        if decisions.numbers is None:
            parameters = options.label_smoothing, options.z_loss, softcap, scale
            (smoothing, z_loss, cap, factor), numbers = floats_of(parameters, self.device)
            self.numbers = Numbers(
                1 - smoothing, smoothing / setting.vocabulary, z_loss, cap, factor, decisions.all_rows
            )
        nothing, smoothed = no_rows(self.device), self.way.smoothed
        weight, total = None if smoothed else nothing.class_weight, None
        if options.weight is not None:
            weight = options.weight.float().contiguous()
            total = weight.sum() if smoothed and not isinstance(target, Probabilities) else None
        self.knows_activation = numbers is None and temperature is None
        """Whether logit scale and softcap are numbers, the same for all rows."""
        rows = Rows(
            ids,
            nothing.sample_weight if options.sample_weight is None else options.sample_weight,
            weight,
            total,
            nothing.divisor,
            nothing.temperature if temperature is None else temperature,
            nothing.numbers if numbers is None else numbers,
            nothing.order,
        )
        statistics = decisions.stats or decisions.statistics
        alone = numbers is temperature is options.weight is options.sample_weight is None
        self.plain = alone and isinstance(target, Classes) and not statistics
        """Whether rows have only targets, a divisor, a loss and its gradient."""
        self.kind = alignment(ids, options.sample_weight, options.weight, temperature)
        """The alignment of the tensors in argument groups that may be those of callers; that of others is known."""
        self.upstreams = no_upstreams(self.device)
        if upstream is not None:
            expanded = {
                name: gradient.expand(self.count).contiguous()
                for name, gradient in zip(Upstreams._fields, upstream, strict=True)
                if gradient is not None
            }
            self.upstreams = self.upstreams._replace(**expanded)
            self.kind += alignment(*expanded.values())
        if upstream is None and looks_at_targets(self.device):
            if ids is not None and self.limit != _NO_LIMIT:
                check_targets(ids, self.ignore_index, self.limit)
            elif isinstance(target, TopK):
                of_rows = torch.ones(self.count) if options.sample_weight is None else options.sample_weight
                impossible(target, setting, of_rows == 0)
        mean = options.reduction == "mean"
        self.has_divisor = mean or setting.in_float16 or decisions.counts
        self.counted: Tensor | None = None
        """() int64: the number of rows with a target; None if no statistic needs it."""
        if decisions.counts:
            self.counted = torch.empty((), dtype=torch.int64, device=self.device)
        alike = isinstance(target, Classes) and options.weight is options.sample_weight is options.normalizer is None
        self.counts = mean and alike and self.count <= MOST_COUNTED and not (setting.in_float16 or decisions.counts)
        """Whether `rows_kernel` counts the rows that divide a mean, and needs no divisor."""
        self.rows = rows
        """With the divisor, unless `counts`."""
        if self.has_divisor and not self.counts:
            self.rows = rows._replace(divisor=self._divisor(rows, options.normalizer if mean else 1.0))
        self._divided: Rows | None = None

    @property
    def divided(self) -> Rows:
        """The group of rows with the divisor of a mean."""
        if not self.counts:
            return self.rows
        if self._divided is None:
            self._divided = self.rows._replace(divisor=self._divisor(self.rows, None))
        return self._divided

    def _divisor(self, rows: Rows, normalizer: Scalar) -> Tensor:
        """Return `Rows.divisor`. The same launch writes `counted`."""
        in_float16, shards, device = self.setting.in_float16, self.setting.call.shards, self.device
        if not (normalizer is None or isinstance(normalizer, Tensor)):
            normalizer = torch.full((), float(normalizer), dtype=torch.float32, device=device)
        nothing, class_weight = absent(device), None if self.options.weight is None else rows.class_weight
        weight = class_weight if self.limit != _NO_LIMIT and (in_float16 or normalizer is None) else None
        if shards is not None and weight is not None and rows.target is not None:
            weight = weights_of(weight, cast(rows.target, torch.int64), shards)
        others, scale, numbers = 0.0, 1.0, None
        if in_float16:
            (others, scale), numbers = floats_of(options_of_float16(self.setting, class_weight), device)
        weight = nothing if weight is None else weight
        if weight is not rows.class_weight or rows.total_weight is not None:
            rows = rows._replace(class_weight=weight, total_weight=None)
        divisor, launches = torch.empty(3, dtype=torch.float32, device=device), self.decisions.launches
        if "divisor" not in launches:
            launches["divisor"] = Launch(divisor_kernel, {"BLOCK": _DIVISOR_BLOCK}, num_warps=16)
        launches["divisor"](
            *(self.kind, 1, rows, nothing if normalizer is None else normalizer, divisor),
            *(absent(device, torch.int64) if self.counted is None else self.counted, self.count, self.ignore_index),
            *(self.limit, others, scale, nothing if numbers is None else numbers),
            *(int(in_float16), int(shards is not None)),
        )
        return divisor

    def rows_of(self, part: Part, start: int = 0, counts: bool = False) -> tuple[Rows, int, object]:
        """Return the group of rows for a launch on rows of a part from `start` on, and the index of the first one.

        The index counts in `Rows.order`, or in the order of the call. The third value is the kind of the launch.
        `counts`: whether the kernel needs no divisor if `self.counts`.
        """
        order, rows = part.rows, self.rows if counts else self.divided
        if order is None:
            return rows, part.start + start, self.kind
        return rows._replace(order=order), start, (self.kind, order.data_ptr() % 16 == 0)

    def quick(self, half: bool) -> bool:
        """Return whether capped logits may have an error of softcap / (3 * 10^6), which is faster to compute.

        This is so for 16-bit logits of many classes, unless the softcap is large, unknown or differs by row.
        """
        if not (self.way.capped and half and self.knows_activation and self.setting.vocabulary >= _MANY):
            return False
        return self.numbers.softcap <= _LARGEST_SOFTCAP


def floats_of(numbers: tuple[Scalar, ...], device: torch.device) -> tuple[list[float], Tensor | None]:
    """Return numbers as floats, 0 for None and tensors; and if one is a tensor, (K,) float32 of all numbers."""
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    floats = [0.0 if number is None or isinstance(number, Tensor) else float(number) for number in numbers]
    if not tensors:
        return floats, None
    of_all = torch.zeros(len(floats), dtype=torch.float32, device=device)
    for place, number, value in zip(of_all, numbers, floats, strict=True):
        place.copy_(number) if isinstance(number, Tensor) else place.fill_(value)
    return floats, of_all
