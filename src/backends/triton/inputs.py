"""What the rows of one call have besides logits, in the form of kernel arguments.

Kernels read targets, weights and upstream gradients from the caller's own tensors. The divisor of a mean and the number
of rows with a target take one launch, before the first kernel that needs them.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Part, Setting, columns, smooths
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.memory import cast
from xent.backends.torch.portable.facts import check_targets, weights_of
from xent.backends.triton.kernels.beside import divisor_kernel
from xent.backends.triton.launches import Columns, Numbers, Rows, Upstreams, Way, launch, next_power_of_2
from xent.core.call import Allowed, Classes, Probabilities

__all__ = ["Inputs"]

_MANY = 1024
_LARGEST_SOFTCAP = 256
_NO_LIMIT = 2**62


class Inputs:
    """The rows of a call: argument groups, numbers and constants of kernels."""

    def __init__(self, setting: Setting) -> None:
        call, upstream = setting.call, setting.upstream
        options, target, (scale, softcap, temperature) = call.options, call.target, call.activation
        self.setting, self.options, self.device, self.count = setting, options, setting.device, setting.count
        ids: Tensor | None = None
        self.ignore_index, self.limit = -1, _NO_LIMIT
        """Which `rows.target` is ignored, and from which number on it is invalid."""
        if isinstance(target, (Classes, Allowed)):
            ids, self.ignore_index, self.limit = target.ids, options.ignore_index, setting.vocabulary
        elif isinstance(target, Probabilities):
            ids = target.order
        values = options.label_smoothing, options.z_loss, softcap, scale
        smoothing, z_loss, *activation = (
            0.0 if one is None or isinstance(one, Tensor) else float(one) for one in values
        )
        self.numbers = Numbers(1 - smoothing, smoothing / setting.vocabulary, z_loss, *activation)
        statistics = upstream is not None and upstream[1:] != (None, None, None)
        self.way = Way(
            capped=softcap is not None,
            scaled=isinstance(scale, Tensor) or scale != 1 or temperature is not None,
            smoothed=smooths(values[0]) or isinstance(target, Probabilities),
            z_loss=isinstance(values[1], Tensor) or z_loss != 0,
            all_rows=bool(options.stats) or statistics,
            statistics=statistics,
            tilted=upstream is not None and upstream.entropy is not None,
        )
        """What all launches of a call share."""
        weight = None if options.weight is None else options.weight.float().contiguous()
        self.plain_rows = Rows(
            _contiguous(ids),
            _contiguous(options.sample_weight),
            weight,
            weight.sum() if weight is not None and self.way.smoothed else None,
            None,
            _contiguous(temperature),
            self._in_one(values) if any(isinstance(one, Tensor) for one in values) else None,
        )
        """`rows` without the divisor."""
        self.mean = options.reduction == "mean"
        if upstream is None and looks_at_targets(self.device):
            self._check(temperature)
        counts = "count" in options.stats or "accuracy" in options.stats
        self._counted = torch.empty((), dtype=torch.int64, device=self.device) if counts else None
        if call.shards is not None:
            _ = self.rows  # now, because ranks without classes skip kernels, and this may be a collective

    @cached_property
    def rows(self) -> Rows:
        """The group of what rows have, with the divisor if a kernel needs it."""
        if self.mean or self.setting.narrow:
            return self.plain_rows._replace(divisor=self.divided)
        return self.plain_rows

    @cached_property
    def upstreams(self) -> Upstreams:
        """The upstream gradients of a backward pass."""
        given = self.setting.upstream or ()
        return Upstreams(*(None if one is None else one.expand(self.count).contiguous() for one in given))

    @property
    def counted(self) -> Tensor | None:
        """() int64: the number of rows with a target; None if no statistic needs it."""
        _ = self._counted is None or self.divided
        return self._counted

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
        names = columns(self.setting)
        return Columns(*(names.index(name) if name in names else -1 for name in Columns._fields))

    def quick(self, half: bool) -> bool:
        """Return whether capped logits may have an error of softcap / (3 * 10^6), which is faster to compute.

        This is so for 16-bit logits of many classes, unless the softcap is large, unknown or differs by row.
        """
        known = self.plain_rows.numbers is None and self.plain_rows.temperature is None
        exact = self.way.capped and not (known and self.numbers.softcap <= _LARGEST_SOFTCAP)
        return half and self.setting.vocabulary >= _MANY and not exact

    def _check(self, temperature: Tensor | None) -> None:
        """Raise IndexError or ValueError for the first target or temperature that is invalid."""
        if self.limit != _NO_LIMIT:
            check_targets(cast(self.plain_rows.target, torch.int64), self.limit, self.ignore_index)
        if temperature is not None and bool(temperature.isnan().any()):
            place = int(temperature.isnan().nonzero()[0])
            raise ValueError(f"temperature must be > 0 in every row, got {float(temperature[place])} at [{place}]")

    def _in_one(self, values: tuple[Any, ...]) -> Tensor:
        """Return `Rows.numbers`."""
        made = torch.zeros(4, dtype=torch.float32, device=self.device)
        for place, one in zip(made, values, strict=True):
            place.copy_(one) if isinstance(one, Tensor) else place.fill_(one or 0.0)
        return made

    @cached_property
    def divided(self) -> Tensor:
        """`Rows.divisor`. The same launch writes `_counted`."""
        made = torch.empty(3, dtype=torch.float32, device=self.device)
        narrow, normalizer = self.setting.narrow, self.options.normalizer if self.mean else 1.0
        if not (normalizer is None or isinstance(normalizer, Tensor)):
            normalizer = torch.full((), float(normalizer), dtype=torch.float32, device=self.device)
        weight, row_weight = self.plain_rows.class_weight, None
        if self.setting.call.shards is not None and weight is not None and (narrow or normalizer is None):
            row_weight = weights_of(weight, cast(self.plain_rows.target, torch.int64), self.setting.call.shards)
        launch(
            divisor_kernel,
            1,
            (
                self.plain_rows,
                row_weight,
                normalizer,
                made,
                self._counted,
                self.count,
                self.ignore_index,
                self.limit,
            ),
            {
                "NARROW": narrow,
                "WEIGHTED": self.limit != _NO_LIMIT and self.setting.call.shards is None,
                "BLOCK": min(next_power_of_2(max(self.count, 16)), 4096),
            },
            num_warps=4 if self.count <= 1024 else 16,
        )
        return made


def _contiguous(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()
