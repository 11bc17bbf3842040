"""`linear_cross_entropy` in PyTorch: make a chunk's logits, overwrite them with their gradient, multiply it back."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts
from xent.backends.torch.gradients import Gradients
from xent.backends.torch.kernels import Kernels, kernels
from xent.backends.torch.options import Options
from xent.backends.torch.results import Results, new_results
from xent.backends.torch.schedule import Part, Schedule
from xent.core.chunks import rows_per_chunk

__all__ = ["Linear", "backward", "forward"]


@dataclass(frozen=True, eq=False)
class Linear:
    """The classifier's side of a call, and which gradients somebody asked for."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    shift: int
    workspace: int | None
    compute: torch.dtype
    needs: tuple[bool, bool, bool]
    """Gradients of input, weight, bias."""

    @cached_property
    def hidden(self) -> Tensor:
        """(N, D), in the caller's dtype."""
        return self.input.reshape(self.input.shape[:-1].numel(), self.input.shape[-1])

    @cached_property
    def classifier(self) -> Tensor:
        """(V, D), in the compute dtype."""
        return self.weight.to(self.compute)

    @cached_property
    def classifier_bias(self) -> Tensor | None:
        """(V,), in the compute dtype."""
        return None if self.bias is None else self.bias.to(self.compute)

    def rows_per_chunk(self) -> int:
        """Return how many rows of logits are alive at one time."""
        return rows_per_chunk(
            len(self.hidden), len(self.weight), self.compute.itemsize, self.workspace, self.weight.device.type
        )


@dataclass(frozen=True, eq=False)
class _Chunk:
    """R rows, in the compute dtype."""

    part: Part
    hidden: Tensor
    """(R, D)"""
    logits: Tensor
    """(R, V), memory that the next chunk uses again."""
    target_logits: Tensor | None
    """(R,) float32, where the compute dtype rounds: most of the loss's error is the rounding of this one logit."""


def forward(linear: Linear, options: Options, keep_norm: bool) -> tuple[Facts, Results, list[Tensor]]:
    """Return facts and results of all rows, and gradients, unless the norm is kept for backward to make them."""
    chosen = kernels(options.kernel)
    facts = chosen.gather_facts(options, linear.weight.shape[0], linear.compute, linear.shift)
    schedule = Schedule(facts, linear.rows_per_chunk())
    results = new_results(schedule.facts, keep_norm)
    run = chosen.row_pass(schedule.facts, results)
    gradients = Gradients(linear, schedule, not keep_norm)
    for chunk in _chunks(linear, chosen, schedule):
        run.forward(chunk.logits, chunk.part.start, chunk.logits if gradients.any else None, chunk.target_logits)
        gradients.add(chunk.part, chunk.hidden, chunk.logits)
    return facts, schedule.in_callers_order(results), gradients.result()


def backward(upstream: Tensor, linear: Linear, norm: Tensor, options: Options) -> list[Tensor]:
    """Return the gradients for `upstream`, that of the rows' losses, from logits made again chunk by chunk."""
    chosen = kernels(options.kernel)
    facts = chosen.gather_facts(options, linear.weight.shape[0], linear.compute, linear.shift, upstream)
    schedule = Schedule(facts, linear.rows_per_chunk())
    run = chosen.row_pass(schedule.facts, Results(schedule.facts.weight, schedule.ordered(norm)))
    gradients = Gradients(linear, schedule, True)
    for chunk in _chunks(linear, chosen, schedule):
        run.backward(chunk.logits, chunk.part.start, chunk.logits, chunk.target_logits)
        gradients.add(chunk.part, chunk.hidden, chunk.logits)
    return gradients.result()


def _chunks(linear: Linear, chosen: Kernels, schedule: Schedule) -> Iterator[_Chunk]:
    compute, weight, bias = linear.compute, linear.classifier, linear.classifier_bias
    memory = torch.empty(min(schedule.step, schedule.count), len(weight), dtype=compute, device=weight.device)
    target = schedule.facts.target
    for part in schedule:
        hidden = part.take(linear.hidden).to(compute)
        logits = memory[: len(hidden)]
        if bias is None:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden, weight.t(), out=logits)
        target_logits = None
        if target is not None and compute in (torch.bfloat16, torch.float16):
            target_logits = chosen.target_logits(hidden, weight, bias, target[part.start : part.stop])
        yield _Chunk(part, hidden, logits, target_logits)
