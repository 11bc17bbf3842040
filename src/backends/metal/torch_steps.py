"""The steps of a call on an Apple GPU: the Metal kernel computes whole rows of PyTorch logits.

The kernel is compiled by `torch.mps.compile_shader` for each combination of template arguments. It writes to given
memory, and the gradient may overwrite the logits. The saved sums of a row are the kernel's norm and entropy, in the
columns of the sums that they replace.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.metal.sources import INPUTS, OUTPUTS, KernelError, Template, kernel_for, library
from xent.backends.torch.contract import STEPS, Block, Part, Setting, smooths
from xent.backends.torch.portable.facts import Index, at, index_of
from xent.backends.torch.portable.rows import probabilities
from xent.backends.torch.portable.steps import PortableSteps
from xent.core.call import Classes, Probabilities
from xent.core.spec import ROW_STATS

__all__ = ["MetalSteps"]

_TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
_compiled: dict[tuple[Any, ...], Any] = {}


class MetalSteps(PortableSteps):
    """See `xent.backends.torch.contract.Steps`."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        options, names = setting.call.options, self.facts.names
        self._places = {"peak": 0, "log_sum": 1} | ({"entropy": names.index("mixed")} if "mixed" in names else {})
        self._asked = {
            name: torch.int64 if name == "predictions" else torch.float32
            for name in ROW_STATS[1:]  # the lse follows from the norm
            if name in options.stats or (name == "predictions" and "accuracy" in options.stats)
        }
        weight = None if self.facts.class_weight is None else self.facts.class_weight.contiguous()
        (scale, cap, heat), ones = self.facts.activation, torch.ones(setting.count, device=setting.device)
        numbers = torch.zeros(8, device=setting.device)  # see `xent.backends.mlx.kernels.Facts.numbers`
        smoothing, total = options.label_smoothing, setting.vocabulary if weight is None else weight.sum()
        parameters = (smoothing, options.z_loss, cap, scale, smoothing / setting.vocabulary, total)
        for place, value in zip(numbers.unbind(), parameters, strict=False):
            place.copy_(value) if isinstance(value, Tensor) else place.fill_(value or 0.0)
        self._whole = {"numbers": numbers, "class_weight": weight}
        self._rows_of: dict[str, Tensor | None] = {
            "target": self.facts.target,
            "row_activation": None if heat is None else torch.stack([numbers[3], numbers[2]]) / heat[:, None],
            "weight": self.facts.weight,
            "scale": self.facts.scale,
            "excluded": ones == 0 if self.facts.excluded is None else self.facts.excluded.contiguous(),
        }

    def whole_rows(self, block: Block, part: Part, saved: Tensor | None) -> None:
        """Compute rows with one launch of the kernel for each block with contiguous classes."""
        for rows in self.row_blocks(block):
            self._compute(rows, part, saved)

    def _compute(self, block: Block, part: Part, saved: Tensor | None) -> None:
        logits, stats, count = block.logits, self.setting.call.options.stats, len(block.logits)
        index = index_of(part, block.start, block.start + count)
        results = {name: logits.new_empty(count, dtype=dtype) for name, dtype in self._asked.items()}
        results["loss"] = logits.new_empty(count, dtype=torch.float32)
        if saved is not None or not {"lse", "z_loss"}.isdisjoint(stats):
            results["norm"] = logits.new_empty(count, 2, dtype=torch.float32)
        if count:
            self._launch(block, index, results)
        if (norm := results.pop("norm", None)) is not None:
            peak, log_sum = norm.unbind(1)
            lse = results["lse"] = torch.where(peak == -torch.inf, peak, peak + log_sum)
            if "z_loss" in stats:
                weight, factor = at(self.facts.weight, index), self.setting.call.options.z_loss
                term = factor * lse.square() if smooths(factor) else torch.zeros_like(lse)
                results["z_loss"] = term * weight
            if saved is not None:
                columns = {"peak": peak, "log_sum": log_sum} | results
                for name, place in self._places.items():
                    saved[place, index] = columns[name]
        if "accuracy" in stats and isinstance(self.setting.call.target, Probabilities):
            results["truth"] = probabilities(self.facts.rows(index)).argmax(-1)
        self.record(results, index)

    def finish(self, sums: Tensor, part: Part, needs_gradient: bool, saved: Tensor | None) -> Any:
        """Return the saved values by name, (R,) each: this is called in backward passes only."""
        return {name: sums[0, place] for name, place in self._places.items()}

    def gradient(self, block: Block, part: Part, coefficients: Any) -> None:
        """Write the gradient of whole rows, with one launch of the kernel for each block with contiguous classes."""
        if block.grad is not None:
            for rows in self.row_blocks(block):
                self._differentiate(rows, coefficients, part)

    def _differentiate(self, block: Block, coefficients: Any, part: Part) -> None:
        rows, upstream = slice(block.start, block.start + len(block.logits)), self.facts.upstream
        if not len(block.logits):
            return
        index = index_of(part, rows.start, rows.stop)
        saved = {name: column[rows] for name, column in coefficients.items()}
        known, stacked = torch.stack([saved["peak"], saved["log_sum"]], -1), None
        if any(grad is not None for grad in upstream):
            upstreams = (*(at(grad, index) for grad in upstream[1:]), saved.get("entropy"))
            nothing = torch.zeros_like(known[:, 0])
            stacked = torch.stack([nothing if column is None else column for column in upstreams], -1)
        self._launch(block, index, {}, known, stacked)

    def _launch(
        self,
        block: Block,
        index: Index,
        results: dict[str, Tensor],
        known: Tensor | None = None,
        upstream: Tensor | None = None,
    ) -> None:
        """Fill the results (R, ...) and the gradient of a block; KernelError if the kernel cannot run."""
        options, logits, grad = self.setting.call.options, block.logits, block.grad
        (count, vocabulary), target_probs = logits.shape, None
        if isinstance(self.setting.call.target, Probabilities):
            target_probs = probabilities(self.facts.rows(index))
            target_probs = (target_probs if target_probs.dtype in _TYPES else target_probs.float()).contiguous()
        if grad is not None:
            results = results | {"grad": grad if grad.dtype == logits.dtype else torch.empty_like(logits)}
        arguments: dict[str, Tensor | None] = dict.fromkeys(INPUTS) | {"logits": logits, "probabilities": target_probs}
        arguments |= {"target_logits": block.target_logits, "known": known, "upstream": upstream, **self._whole}
        arguments |= {name: at(tensor, index) for name, tensor in self._rows_of.items()}
        template, threads = kernel_for(
            arguments,
            results,
            lambda template, most: _kernel(template).max_threads_per_threadgroup >= most,
            T=_TYPES[logits.dtype],
            Probability="float" if target_probs is None else _TYPES[target_probs.dtype],
            SMOOTHED=smooths(options.label_smoothing),
            CAPPED=self.facts.activation.softcap is not None,
            SKIPS_EXCLUDED=not self._asked and "lse" not in options.stats,
        )
        # Placeholders for missing tensors are not accessed.
        tensors = [*arguments.values(), *map(results.get, OUTPUTS)]
        _kernel(template)(
            *(logits if tensor is None else tensor for tensor in tensors),
            vocabulary,
            logits.stride(0),
            results.get("grad", logits).stride(0),
            threads=(threads, count),
            group_size=(threads, 1),
        )
        if grad is not None and grad.dtype != logits.dtype:
            grad.copy_(results["grad"])


def _kernel(template: Template) -> Any:
    """Return the kernel for template arguments. Each is compiled at most once."""
    key = tuple(template.values())
    if key not in _compiled:
        try:
            _compiled[key] = torch.mps.compile_shader(library(template)).xent_rows
        except (RuntimeError, SyntaxError) as error:  # PyTorch raises SyntaxError for errors of Metal's compiler
            raise KernelError(error) from error
    return _compiled[key]


def _start(setting: Setting) -> PortableSteps:
    served = isinstance(setting.call.target, (Classes, Probabilities)) and setting.call.shards is None
    return MetalSteps(setting) if served else PortableSteps(setting)


STEPS["metal"] = _start
