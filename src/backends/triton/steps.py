"""The steps of a call on NVIDIA GPUs: launches of Triton kernels. See `xent.backends.torch.contract.Steps`."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import STEPS, Block, Part, Setting, Steps, Taken
from xent.backends.torch.passes import SCALES
from xent.backends.torch.portable.steps import PortableSteps
from xent.backends.triton import separate, targets
from xent.backends.triton.groups import Results, Upstreams
from xent.backends.triton.inputs import Inputs
from xent.backends.triton.kernels.divergence_shard_kernel import FOLD, GRADIENT, REFOLD
from xent.backends.triton.kernels.facts_kernels import partition_kernel
from xent.backends.triton.kernels.linear_kernels import sums_kernel, take_kernel
from xent.backends.triton.prepared import cdiv, launch, next_power_of_2
from xent.backends.triton.scale import scale
from xent.backends.triton.whole import whole_rows
from xent.core.call import Allowed, Classes, Dense

__all__ = ["TritonSteps"]

_FIELDS = {"accuracy": "hits", "z_loss": "z_term"}
"""The members of `Results` that have other names than their statistics."""


class TritonSteps:
    """The steps of a call, for all targets without shards, and for class targets in shards."""

    takes_any_strides = True
    tiles = True
    overlays = True

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.inputs = inputs = Inputs(setting)
        self.fuses = setting.call.shards is None
        self.saves = isinstance(setting.call.target, Classes)
        self.deferred = inputs.deferred
        self._skips = False

    @property
    def upstreams(self) -> Upstreams:
        """The upstream gradients of a backward pass."""
        return self.inputs.upstreams

    @cached_property
    def recorded(self) -> Results:
        """The memory of the results that kernels record; None in a backward pass. Results of skipped rows are 0."""
        if self.setting.upstream is not None:
            return Results(None)
        names = [_FIELDS.get(name, name) for name in self.setting.call.options.stats if name != "count"]
        return Results(**{name: self._each(name) for name in ("loss", *names)})

    def _each(self, name: str) -> Tensor:
        """Return memory for a result of rows."""
        shape, device, is_class = (self.setting.count,), self.setting.device, name == "predictions"
        dtype = torch.int64 if is_class else torch.float32
        if self._skips:
            return torch.full(shape, -1 if is_class else 0, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device)

    def partition(self, several: bool) -> tuple[Tensor | None, int | Tensor]:
        """Move the rows that must be computed to the front, in one launch."""
        inputs, count, device = self.inputs, self.setting.count, self.setting.device
        on_host = device.type == "cpu"
        if not count or not (on_host or (several and not torch.cuda.is_current_stream_capturing())):
            return None, count
        order = torch.empty(count, dtype=torch.int64, device=device)
        number = torch.empty((), dtype=torch.int64, device=device)
        launch(
            partition_kernel,
            min(cdiv(count, 1024), 64),
            (inputs.plain_rows, order, number, count, inputs.ignore_index, inputs.limit),
            {"ALL_ROWS": inputs.all_rows, "COUNTED": 8192, "BLOCK": 1024},
            num_warps=8,
        )
        if on_host and int(number) == count:
            return None, count
        self._skips = True
        return order, int(number) if on_host else number

    def take(self, source: Any, part: Part) -> Taken:
        """Return the hidden states of a part and its target logits, in one launch."""
        inputs, target, (rows, start) = self.inputs, self.setting.call.target, self.inputs.rows_of(part)
        count, hidden, weight, bias = part.stop - part.start, source.hidden, source.weight, source.bias
        device, size = hidden.device, hidden.shape[1]
        rounded = source.compute.itemsize == 2 and isinstance(target, (Classes, Allowed))
        target_logits = torch.empty(count, dtype=torch.float32, device=device) if rounded else None
        trained = torch.empty(count, size, dtype=source.compute, device=device) if source.needs[1] else None
        if count and (rounded or trained is not None):
            launch(
                take_kernel,
                count,
                (
                    hidden,
                    *hidden.stride(),
                    weight,
                    *weight.stride(),
                    bias,
                    0 if bias is None else bias.stride(0),
                    trained,
                    target_logits,
                    rows,
                    start,
                    inputs.ignore_index,
                    inputs.limit,
                    self.setting.first,
                    self.setting.width,
                    size,
                ),
                {"STATISTICS": inputs.statistics, "BLOCK": min(next_power_of_2(max(size, 1)), 2048)},
                num_warps=4,
            )
        # Rows without a gradient still have statistics, which need their real hidden states.
        apart = (
            inputs.all_rows and not inputs.statistics and (rows.sample_weight is not None or rows.divisor is not None)
        )
        taken = source.take(part) if trained is None or apart else trained
        return Taken(taken, taken if trained is None else trained, target_logits)

    def whole_rows(self, block: Block, part: Part, saved: Tensor | None) -> None:
        """Fold and finish rows in one launch, and write their gradient."""
        if isinstance(self.setting.call.target, Classes):
            whole_rows(self.inputs, self.recorded, block, part, saved)
        else:
            targets.whole_rows(self, block, part, saved)

    def meet(self, sums: Tensor) -> None:
        """Do nothing: these targets take one round of folds."""

    fold, finish, gradient = separate.fold, separate.finish, separate.gradient
    fold_product, gradient_product = separate.fold_product, separate.gradient_product

    def results(self) -> list[Tensor]:
        """Return the loss and the statistics; those of all rows are reduced in one launch."""
        inputs, recorded, options = self.inputs, self.recorded, self.setting.call.options
        stats, reduces = options.stats, options.reduction != "none"
        loss, z_term, accuracy = recorded.loss, recorded.z_term, recorded.hits
        total = self._one() if reduces else None
        total_z = self._one() if reduces and z_term is not None else None
        share = self._one() if accuracy is not None and not options.accuracy_of_rows else None
        if total is not None or share is not None:
            launch(
                sums_kernel,
                1,
                (
                    recorded,
                    inputs.rows.divisor if inputs.mean else None,
                    inputs.counted,
                    total,
                    total_z,
                    share,
                    self.setting.count,
                ),
                {"BLOCK": 4096},
                num_warps=16,
            )
        found = {
            **recorded._asdict(),
            "z_loss": z_term if total_z is None else total_z,
            "accuracy": accuracy if share is None else share,
            "count": inputs.counted if "count" in stats else None,
        }
        return [loss if total is None else total, *(found[name] for name in stats)]

    def _one(self) -> Tensor:
        return torch.empty((), dtype=torch.float32, device=self.setting.device)


_MERGED = "peak", "rest", "teacher_peak", "teacher_rest", "teacher_top"


class ShardedSteps(PortableSteps):
    """The steps of a dense teacher's divergence in shards: each fold, and the gradient, in one launch."""

    overlays = True
    recorded = Results(None)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.setting, self.inputs = setting, Inputs(setting)
        self.upstreams = self.inputs.upstreams

    def fold(self, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
        """Write the sums of a block."""
        if self.setting.width:
            merged = _stacked(self.met, _MERGED) if self.met else None
            step = FOLD if merged is None else REFOLD
            targets.shard(self, block._replace(grad=None), part, step, sums, merged)
        else:
            super().fold(block, part, sums, adds)

    def gradient(self, block: Block, part: Part, coefficients: Any) -> None:
        """Write the gradient of a block's logits."""
        if self.setting.width:
            targets.shard(self, block, part, GRADIENT, None, _stacked(coefficients, (*_MERGED, "pull")))


def _stacked(sums: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    return torch.stack([sums[name] for name in names])


def _start(setting: Setting) -> Steps:
    call = setting.call
    if isinstance(call.target, Classes) or targets.serves(setting):
        return TritonSteps(setting)
    if isinstance(call.target, Dense) and not isinstance(call.options.beta, Tensor):
        return ShardedSteps(setting)
    return PortableSteps(setting)


STEPS["triton"] = _start
SCALES["triton"] = scale
