"""What the rows of one call have besides logits, in the form of kernel arguments.

Kernels read targets, weights and upstream gradients from the caller's own tensors. The divisor of a mean and the number
of rows with a target take one launch.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Part, Setting, columns, smooths
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.memory import cast
from xent.backends.torch.portable.rows import impossible, options_of_float16, weights_of
from xent.backends.torch.refusals import check_targets
from xent.backends.triton.kernels.sums import divisor_kernel
from xent.backends.triton.launches import Columns, Numbers, Results, Rows, Upstreams, Way, launch, next_power_of_2
from xent.core.call import Allowed, Classes, Probabilities, TopK

__all__ = ["Inputs", "floats_of"]

_MANY = 1024
_LARGEST_SOFTCAP = 256
_NO_LIMIT = 2**62


class Inputs:
    """The rows of a call: argument groups, numbers and constants of kernels."""

    recorded = Results()
    """The memory of the results that kernels record."""

    def __init__(self, setting: Setting) -> None:
        call, upstream = setting.call, setting.upstream
        options, target, (scale, softcap, temperature) = call.options, call.target, call.activation
        self.setting, self.options, self.device, self.count = setting, options, setting.device, setting.count
        ids: Tensor | None = None
        self.ignore_index, self.limit = -1, _NO_LIMIT
        """The `rows.target` that is ignored, and the smallest one that is invalid."""
        if isinstance(target, (Classes, Allowed)):
            ids, self.ignore_index, self.limit = target.ids, options.ignore_index, setting.vocabulary
        elif isinstance(target, Probabilities):
            ids = target.order
        values = options.label_smoothing, options.z_loss, softcap, scale
        (smoothing, z_loss, *activation), numbers = floats_of(values, self.device)
        self.numbers = Numbers(1 - smoothing, smoothing / setting.vocabulary, z_loss, *activation)
        given = [None if one is None else one.expand(self.count).contiguous() for one in upstream or ()]
        self.upstreams = Upstreams(*given)
        statistics, of_entropy = any(one is not None for one in given[1:]), self.upstreams.entropy is not None
        self.stats = stats = options.stats if upstream is None else ()
        """The statistics that are computed."""
        self.way = Way(
            capped=softcap is not None,
            scaled=isinstance(scale, Tensor) or scale != 1 or temperature is not None,
            smoothed=smooths(values[0]) or isinstance(target, Probabilities),
            z_loss=isinstance(values[1], Tensor) or z_loss != 0,
            all_rows=bool(stats) or statistics,
            statistics=statistics,
            of_entropy=of_entropy,
            entropy=of_entropy or "entropy" in stats,
            squared="log_sum_sq_probs" in stats,
            averaged="mean_logit" in stats,
            predicted="predictions" in stats or "accuracy" in stats,
        )
        """What all launches of a call share."""
        weight = None if options.weight is None else options.weight.float().contiguous()
        total = weight.sum() if weight is not None and self.way.smoothed else None
        self.rows = Rows(ids, options.sample_weight, weight, total, None, temperature, numbers)
        if upstream is None and looks_at_targets(self.device):
            if ids is not None and self.limit != _NO_LIMIT:
                check_targets(ids, self.ignore_index, self.limit)
            elif isinstance(target, TopK):
                of_rows = torch.ones(self.count) if options.sample_weight is None else options.sample_weight
                impossible(target, setting, of_rows == 0)
        self.mean = options.reduction == "mean"
        self.counted: Tensor | None = None
        """() int64: the number of rows with a target; None if no statistic needs it."""
        if "count" in stats or "accuracy" in stats:
            self.counted = torch.empty((), dtype=torch.int64, device=self.device)
        if self.mean or setting.in_float16 or self.counted is not None:
            self.rows = self.rows._replace(divisor=self._divisor())

    def _divisor(self) -> Tensor:
        """Return `Rows.divisor`. The same launch writes `counted`."""
        rows, in_float16, shards = self.rows, self.setting.in_float16, self.setting.call.shards
        normalizer = self.options.normalizer if self.mean else 1.0
        if not (normalizer is None or isinstance(normalizer, Tensor)):
            normalizer = torch.full((), float(normalizer), dtype=torch.float32, device=self.device)
        weight = rows.class_weight if self.limit != _NO_LIMIT and (in_float16 or normalizer is None) else None
        if shards is not None and weight is not None:
            weight = weights_of(weight, cast(rows.target, torch.int64), shards)
        bound = options_of_float16(self.setting, rows.class_weight) if in_float16 else (0.0, 1.0)
        (others, scale), numbers = floats_of(bound, self.device)
        rows = rows._replace(class_weight=weight)
        made = torch.empty(3, dtype=torch.float32, device=self.device)
        block = min(next_power_of_2(max(self.count, 16)), 4096)
        launch(
            divisor_kernel,
            1,
            (
                *(rows, normalizer, made, self.counted, self.count, self.ignore_index, self.limit),
                *(others, scale, numbers),
            ),
            {"FLOAT16": in_float16, "OF_ROWS": shards is not None, "BLOCK": block},
            num_warps=4 if self.count <= 1024 else 16,
        )
        return made

    def rows_of(self, part: Part, start: int = 0) -> tuple[Rows, int]:
        """Return the group of rows for a launch on rows of a part from `start` on, and the index of the first one.

        The index counts in `Rows.order`, or in the order of the call.
        """
        if part.rows is None:
            return self.rows, part.start + start
        return self.rows._replace(order=part.rows), start

    @cached_property
    def columns(self) -> Columns:
        """The columns of packed sums."""
        return Columns(**{name: place for place, name in enumerate(columns(self.setting))})

    def quick(self, half: bool) -> bool:
        """Return whether capped logits may have an error of softcap / (3 * 10^6), which is faster to compute.

        This is so for 16-bit logits of many classes, unless the softcap is large, unknown or differs by row.
        """
        known = self.rows.numbers is None and self.rows.temperature is None
        exact = self.way.capped and not (known and self.numbers.softcap <= _LARGEST_SOFTCAP)
        return half and self.setting.vocabulary >= _MANY and not exact


def floats_of(values: Iterable[Any], device: torch.device) -> tuple[list[float], Tensor | None]:
    """Return values as floats, 0 for None and tensors; and if one is a tensor, (K,) float32 of all values."""
    floats = [0.0 if one is None or isinstance(one, Tensor) else float(one) for one in values]
    if not any(isinstance(one, Tensor) for one in values):
        return floats, None
    made = torch.zeros(len(floats), dtype=torch.float32, device=device)
    for place, one, number in zip(made, values, floats, strict=True):
        place.copy_(one) if isinstance(one, Tensor) else place.fill_(number)
    return floats, made
