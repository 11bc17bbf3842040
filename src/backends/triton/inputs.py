"""What the rows of one call have besides logits, in the form of kernel arguments.

Kernels read targets, weights and upstream gradients from the caller's own tensors. The divisor of a mean and the number
of rows with a target take one launch, before the first kernel that needs them.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Part, Setting, smooths
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.memory import cast
from xent.backends.torch.portable.facts import check_targets, weights_of
from xent.backends.triton.groups import Columns, Rows, Upstreams
from xent.backends.triton.kernels.facts_kernels import divisor_kernel
from xent.backends.triton.kernels.sums import column_numbers
from xent.backends.triton.prepared import launch, next_power_of_2
from xent.core.call import Allowed, Classes, Probabilities

__all__ = ["Inputs"]

_MANY = 1024
_LARGEST_SOFTCAP = 256
_NO_LIMIT = 2**62


class Inputs:
    """The rows of a call: argument groups, numbers and constants of kernels."""

    def __init__(self, setting: Setting) -> None:
        call = setting.call
        options, target, (scale, softcap, temperature) = call.options, call.target, call.activation
        self.setting, self.options, self.device = setting, options, setting.device
        self.count, self.vocabulary = setting.count, setting.vocabulary
        ids: Tensor | None = None
        self.ignore_index, self.limit = -1, _NO_LIMIT
        """Which `rows.target` is ignored, and from which number on it is invalid."""
        if isinstance(target, (Classes, Allowed)):
            ids, self.ignore_index, self.limit = target.ids, options.ignore_index, setting.vocabulary
        elif isinstance(target, Probabilities):
            ids = target.order
        smoothing, z_loss = options.label_smoothing, options.z_loss
        self.smoothed = smooths(smoothing)
        weight = options.weight
        if weight is not None:
            weight = weight.float().contiguous()
        self.plain_rows = Rows(
            _contiguous(ids),
            _contiguous(options.sample_weight),
            weight,
            weight.sum() if weight is not None and self.smoothed else None,
            None,
            _contiguous(temperature),
            self._values(smoothing, z_loss, softcap, scale),
        )
        """`rows` without the divisor."""
        number = [0.0 if one is None or isinstance(one, Tensor) else float(one) for one in (smoothing, z_loss, softcap)]
        self.weights = 1 - number[0], number[0] / self.vocabulary, number[1]
        """The kernel arguments keep, spread and z_loss."""
        self.scales = number[2], 1.0 if isinstance(scale, Tensor) else float(scale)
        """The kernel arguments softcap and logit_scale."""
        self.capped = softcap is not None
        self.scaled = isinstance(scale, Tensor) or scale != 1 or temperature is not None
        self.z_loss = isinstance(z_loss, Tensor) or z_loss != 0
        self.mean = options.reduction == "mean"
        upstream = setting.upstream
        if upstream is None and looks_at_targets(self.device):
            self._check(temperature)
        self.statistics = upstream is not None and upstream[1:] != (None, None, None)
        """Whether there are upstream gradients of statistics, which also apply to rows with weight 0."""
        self.all_rows = bool(options.stats) or self.statistics
        """Whether rows with weight 0 must be computed, for their statistics or for gradients of these."""
        counts = "count" in options.stats or "accuracy" in options.stats
        self._counted = torch.empty((), dtype=torch.int64, device=self.device) if counts else None
        if setting.call.shards is not None:
            _ = self.rows  # now, because ranks without classes skip kernels, and this may be a collective

    @cached_property
    def rows(self) -> Rows:
        """The group of what rows have, with the divisor if a kernel needs it."""
        if self.mean or self.setting.narrow:
            return self.plain_rows._replace(divisor=self._divided)
        return self.plain_rows

    @cached_property
    def upstreams(self) -> Upstreams:
        """The group of upstream gradients."""
        given = self.setting.upstream or ()
        return Upstreams(*(None if one is None else one.expand(self.count).contiguous() for one in given))

    @property
    def counted(self) -> Tensor | None:
        """() int64: the number of rows with a target; None if no statistic needs it."""
        _ = self._counted is None or self._divided
        return self._counted

    @property
    def deferred(self) -> Tensor | None:
        """0-d, see `xent.backends.torch.contract.Steps.deferred`."""
        return self._divided[2] if self.setting.narrow else None

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
        return column_numbers(self.setting)

    @cached_property
    def way(self) -> dict[str, bool]:
        """The members of `Way` that all launches of a call share."""
        upstream = self.setting.upstream
        return {
            "capped": self.capped,
            "scaled": self.scaled,
            "smoothed": self.smoothed,
            "z_loss": self.z_loss,
            "all_rows": self.all_rows,
            "statistics": self.statistics,
            "tilted": upstream is not None and upstream.entropy is not None,
        }

    def quick(self, half: bool) -> bool:
        """Return whether capped logits may have an error of softcap / (3 * 10^6), which is faster to compute.

        This is so for 16-bit logits of many classes, unless the softcap is large, unknown or differs by row.
        """
        known = self.plain_rows.numbers is None and self.plain_rows.temperature is None
        return half and self.vocabulary >= _MANY and (not self.capped or (known and self.scales[0] <= _LARGEST_SOFTCAP))

    def _check(self, temperature: Tensor | None) -> None:
        """Raise IndexError or ValueError for the first target or temperature that is invalid."""
        ids = self.plain_rows.target
        if self.limit != _NO_LIMIT:
            check_targets(cast(ids, torch.int64), self.vocabulary, self.ignore_index)
        if temperature is not None and bool(temperature.isnan().any()):
            place = int(temperature.isnan().nonzero()[0])
            raise ValueError(f"temperature must be > 0 in every row, got {float(temperature[place])} at [{place}]")

    def _values(self, *numbers: Any) -> Tensor | None:
        """Return the numbers as a tensor if one of them is a tensor."""
        if not any(isinstance(one, Tensor) for one in numbers):
            return None
        made = torch.zeros(4, dtype=torch.float32, device=self.device)
        for place, one in zip(made, numbers, strict=True):
            place.copy_(one) if isinstance(one, Tensor) else place.fill_(one or 0.0)
        return made

    @cached_property
    def _divided(self) -> Tensor:
        """`Rows.divisor`. The same launch writes `_counted`."""
        made = torch.empty(3, dtype=torch.float32, device=self.device)
        normalizer, narrow = self.options.normalizer, self.setting.narrow
        is_number = self.mean and normalizer is not None and not isinstance(normalizer, Tensor)
        launch(
            divisor_kernel,
            1,
            (
                self.plain_rows,
                self._row_weight(narrow),
                normalizer if isinstance(normalizer, Tensor) and self.mean else None,
                made,
                self._counted,
                float(normalizer) if is_number else 0.0,
                self.count,
                self.ignore_index,
                self.limit,
            ),
            {
                "MEAN": self.mean,
                "NUMBER": is_number,
                "NARROW": narrow,
                "WEIGHTED": self.limit != _NO_LIMIT and self.setting.call.shards is None,
                "BLOCK": min(next_power_of_2(max(self.count, 16)), 4096),
            },
            num_warps=4 if self.count <= 1024 else 16,
        )
        return made

    def _row_weight(self, narrow: bool) -> Tensor | None:
        """Return the class weight of each row's target, (N,), if classes are in shards and it is needed, or None."""
        rows, shards = self.plain_rows, self.setting.call.shards
        averages = self.mean and self.options.normalizer is None
        if shards is None or rows.class_weight is None or not (averages or narrow):
            return None
        return weights_of(rows.class_weight, cast(rows.target, torch.int64), shards)


def _contiguous(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()
