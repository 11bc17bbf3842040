"""The steps of a call on an Apple GPU: Metal kernels compute whole rows, and PyTorch's own operations the rest.

The saved sums of a row are the kernel's norm and entropy, in the columns of the sums that they replace.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from xent.backends.metal import tensors
from xent.backends.metal.sources import KernelError, warn_once
from xent.backends.metal.tensors import RowResults, RowTensors
from xent.backends.torch.contract import STEPS, Block, Part, Setting
from xent.backends.torch.portable import PortableSteps
from xent.backends.torch.portable.facts import Index, at, index_of
from xent.backends.torch.portable.finish import Finished
from xent.backends.torch.portable.rows import LogitRows
from xent.core.call import Classes, Probabilities
from xent.core.spec import ROW_STATS

__all__ = ["MetalSteps"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class MetalSteps(PortableSteps):
    """See `xent.backends.torch.contract.Steps`. Where a kernel cannot run, PyTorch's own operations do its work."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        facts, options, names = self._facts, setting.call.options, self._space.names
        self._places = {"peak": 0, "log_sum": 1} | ({"entropy": names.index("mixed")} if "mixed" in names else {})
        self._asked = {
            name: torch.int64 if name == "predictions" else torch.float32
            for name in ROW_STATS[1:]  # the lse follows from the norm
            if name in options.stats or (name == "predictions" and "accuracy" in options.stats)
        }
        self._skips_dead = not self._asked and "lse" not in options.stats
        self._class_weight = None if facts.class_weight is None else facts.class_weight.contiguous()
        self._bend = self._bends()

    def whole_rows(self, block: Block, part: Part, saved: Tensor | None) -> None:
        """Compute rows with one launch of a kernel."""
        logits, options, count = block.logits, self._setting.call.options, len(block.logits)
        index = index_of(part, block.start, block.start + count, self._setting.count)
        asked = {name: logits.new_empty(count, dtype=dtype) for name, dtype in self._asked.items()}
        loss = logits.new_empty(count, dtype=torch.float32)
        derives = saved is not None or not {"lse", "z_loss"}.isdisjoint(options.stats)
        norm = logits.new_empty(2, count, dtype=torch.float32) if derives else None
        if count:
            try:
                rows = self._row_tensors(index, count, block.target_logits)
                with _in_its_dtype(block.grad, logits) as place:
                    results = RowResults(loss, norm, **asked, grad=place)
                    tensors.launch("forward", logits, rows, results, skips_dead=self._skips_dead)
            except KernelError as error:
                warn_once(error, "PyTorch")
                self._in_pytorch(block, part, saved)
                return
        found = {"loss": loss, **asked}
        if norm is not None:
            found |= self._derived(norm, index)
        if "accuracy" in options.stats and isinstance(self._setting.call.target, Probabilities):
            found["truth"] = self._space.given(index).argmax(-1)
        self._results.record(found, index)
        if saved is not None and norm is not None:
            self._save(saved, index, {"peak": norm[0], "log_sum": norm[1]} | asked)

    def _in_pytorch(self, block: Block, part: Part, saved: Tensor | None) -> None:
        """Compute rows in PyTorch's own operations, and save the same as the kernel."""
        sums = None if saved is None else torch.empty_like(saved)
        super().whole_rows(block, part, sums)
        if saved is not None and sums is not None:
            index = index_of(part, block.start, block.start + len(block.logits), self._setting.count)
            given = dict(
                zip(self._space.names, (one[slice(None) if index is None else index] for one in sums), strict=True)
            )
            done = Finished(self._setting, self._facts, given, index)
            found = {"peak": given["peak"], "log_sum": done.log_sum}
            self._save(saved, index, found | ({"entropy": done.entropy()} if "entropy" in self._places else {}))

    def _save(self, saved: Tensor, index: Index, found: dict[str, Tensor]) -> None:
        for name, place in self._places.items():
            saved[place, slice(None) if index is None else index] = found[name]

    def finish(self, sums: Tensor, part: Part, wanted: bool, saved: Tensor | None) -> Any:
        """Return the saved values by name, (R,) each: this is called in backward passes only."""
        return {name: sums[0, place] for name, place in self._places.items()}

    def gradient(self, block: Block, part: Part, coefficients: Any) -> None:
        """Write the gradient of whole rows with one launch of a kernel."""
        logits, grad, upstream = block.logits, block.grad, self._facts.upstream
        if not len(logits) or grad is None:
            return
        rows = slice(block.start, block.start + len(logits))
        index = index_of(part, rows.start, rows.stop, self._setting.count)
        saved = {name: values[rows] for name, values in coefficients.items()}
        norm, stacked = torch.stack([saved["peak"], saved["log_sum"]]), None
        if any(one is not None for one in upstream):
            given = (*(at(one, index) for one in upstream[1:]), saved.get("entropy"))
            nothing = torch.zeros_like(norm[0])
            stacked = torch.stack([nothing if values is None else values for values in given], -1)
        try:
            with _in_its_dtype(grad, logits) as place:
                rows_of = self._row_tensors(index, len(logits), None)
                tensors.launch("backward", logits, rows_of, RowResults(norm=norm, grad=place), stacked)
        except KernelError as error:
            warn_once(error, "PyTorch")
            for piece, _, index in self._pieces(block, part):
                sums = LogitRows(self._space, piece._replace(grad=None), index).fold()
                made = Finished(self._setting, self._facts, sums, index).coefficients()
                LogitRows(self._space, piece, index).gradient(made)

    def _derived(self, norm: Tensor, index: Index) -> dict[str, Tensor]:
        """Return the results that follow from the norm (2, R)."""
        lse = torch.where(norm[0] == -torch.inf, norm[0], norm[0] + norm[1])
        weight, found = at(self._facts.weight, index), {"lse": lse}
        if "z_loss" in self._setting.call.options.stats:
            factor = self._setting.call.options.z_loss
            term = factor * lse.square() if factor else torch.zeros_like(lse)
            found["z_loss"] = term if weight is None else term * weight
        return found

    def _bends(self) -> Tensor | None:
        """Return scale and softcap (0: none) of each row, (N, 2) or expanded to it; None if numbers serve all rows."""
        scale, cap, temperature = self._facts.activation
        if temperature is None and not isinstance(scale, Tensor) and not isinstance(cap, Tensor):
            return None
        count, device = self._setting.count, self._setting.device
        made = torch.empty(1 if temperature is None else count, 2, dtype=torch.float32, device=device)
        for place, value in zip(made.unbind(1), (scale, 0.0 if cap is None else cap), strict=True):
            place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)
        return made.expand(count, 2) if temperature is None else made.div_(temperature[:, None])

    def _row_tensors(self, index: Index, count: int, target_logits: Tensor | None) -> RowTensors:
        """Return the facts of `count` rows."""
        facts, options, given = self._facts, self._setting.call.options, None
        if isinstance(self._setting.call.target, Probabilities):
            given = self._space.given(index)
            given = given if given.dtype in _FLOATS else given.float()
            given = given if given.stride(-1) == 1 else given.contiguous()
        scale, cap, _ = facts.activation
        return RowTensors(
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            softcap=1.0 if isinstance(cap, Tensor) else cap,
            logit_scale=1.0 if isinstance(scale, Tensor) else scale,
            target=at(facts.target, index),
            target_logits=target_logits,
            probabilities=given,
            class_weight=self._class_weight,
            total_weight=None if self._class_weight is None else self._class_weight.sum(),
            bend=at(self._bend, index),
            weight=self._filled(1.0 if facts.weight is None else facts.weight, index, count),
            scale=self._filled(facts.scale, index, count),
            dead=self._filled(False if facts.dead is None else facts.dead, index, count),
        )

    def _filled(self, values: Any, index: Index, count: int) -> Tensor:
        """Return values of rows as a tensor (R,)."""
        if isinstance(values, Tensor):
            return (at(values, index) if values.dim() else values.expand(count)).contiguous()
        dtype = torch.bool if isinstance(values, bool) else torch.float32
        return torch.full((count,), values, dtype=dtype, device=self._setting.device)


@contextmanager
def _in_its_dtype(grad: Tensor | None, logits: Tensor) -> Iterator[Tensor | None]:
    """Yield memory in the logits' dtype for the kernel's gradient; at the end convert it to the dtype of `grad`."""
    if grad is None or grad.dtype == logits.dtype:
        yield grad
        return
    place = torch.empty_like(logits)
    yield place
    grad.copy_(place)


def _start(setting: Setting) -> PortableSteps:
    options = setting.call.options
    traced = isinstance(options.label_smoothing, Tensor) or isinstance(options.z_loss, Tensor)
    served = isinstance(setting.call.target, (Classes, Probabilities)) and setting.call.shards is None and not traced
    return MetalSteps(setting) if served else PortableSteps(setting)


STEPS["metal"] = _start
