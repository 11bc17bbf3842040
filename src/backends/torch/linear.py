"""`linear_cross_entropy` in PyTorch: make a chunk's logits, overwrite them with their gradient, multiply it back."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import slices
from xent.backends.torch.borrowed import add_first_rows, first_rows
from xent.backends.torch.facts import Facts
from xent.backends.torch.gradients import Gradients, no_gradients
from xent.backends.torch.kernels import Kernels, kernels
from xent.backends.torch.options import Options
from xent.backends.torch.product_sum import rounds_sums
from xent.backends.torch.results import Results, new_results
from xent.backends.torch.schedule import Part, Schedule
from xent.core.chunks import classes_per_slice, rows_per_chunk, tile_shape

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

    def write_logits(self, hidden: Tensor, out: Tensor, classes: slice = slice(None)) -> None:
        """Write the logits (R, C) of those classes to `out`, for hidden (R, D), all in the compute dtype."""
        columns = self.classifier[classes].t()
        if self.classifier_bias is None:
            torch.mm(hidden, columns, out=out)
        else:
            torch.addmm(self.classifier_bias[classes], hidden, columns, out=out)

    def rows_per_chunk(self, first: int = 0) -> int:
        """Return how many rows of logits are alive at one time, but for those `first`."""
        rounds = self.needs[1] and rounds_sums(self.compute, self.weight.dtype, self.weight.device)
        rows, vocabulary, itemsize = len(self.hidden) - first, len(self.weight), self.compute.itemsize
        return rows_per_chunk(rows, vocabulary, itemsize, self.workspace, self.weight.device.type, rounds)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """R rows, in the compute dtype."""

    part: Part
    hidden: Tensor
    """(R, D)"""
    logits: Tensor
    """(R, V), memory that the next chunk uses again."""
    target_logits: Tensor | None
    """(R,) float32, where the compute dtype rounds: most of the loss's error is the rounding of this one logit.

    Also where the forward pass may have come from tiles: other products round otherwise, and this one logit must be
    the same in both passes if p of a sure target, or of an only class, is to be 1.
    """


def forward(linear: Linear, options: Options, keep_norm: bool) -> tuple[Facts, Results, list[Tensor]]:
    """Return facts and results of all rows, and gradients, unless the norm is kept for backward to make them."""
    chosen = kernels(options.kernel)
    facts = chosen.gather_facts(options, linear.weight.shape[0], linear.compute, linear.shift)
    wanted = not keep_norm and any(linear.needs)
    classes = _classes_per_slice(linear, chosen, facts) if wanted else None
    if classes is not None:
        results, schedule = new_results(facts, True), _schedule_of_gradients(linear, facts)
        _forward_in_tiles(linear, chosen, facts, results)
        assert results.norm is not None
        made = slices.gradients(linear, chosen, schedule, results.norm, classes)
        return facts, replace(results, norm=None), made
    if not wanted:
        results = new_results(facts, keep_norm)
        if _forward_in_tiles(linear, chosen, facts, results):
            return facts, results, no_gradients(linear)
    first, piece = first_rows(linear, chosen, facts) if wanted else (0, 0)
    schedule = Schedule(facts, linear.rows_per_chunk(first), first)
    results = new_results(schedule.facts, keep_norm)
    run = chosen.row_pass(schedule.facts, results)
    gradients = Gradients(linear, schedule, chosen) if wanted else None
    parts = iter(schedule)
    if gradients is not None and first:
        add_first_rows(linear, chosen, schedule, parts, results, gradients, piece)
    for chunk in _chunks(linear, chosen, schedule, parts):
        run.forward(chunk.logits, chunk.part.start, chunk.logits if wanted else None, chunk.target_logits)
        if gradients is not None:
            gradients.add(chunk.part, chunk.hidden, chunk.logits)
    made = no_gradients(linear) if gradients is None else gradients.result()
    return facts, schedule.in_callers_order(results), made


def backward(upstream: Tensor, linear: Linear, norm: Tensor, options: Options) -> list[Tensor]:
    """Return the gradients for `upstream`, that of the rows' losses, from logits made again chunk by chunk."""
    chosen = kernels(options.kernel)
    facts = chosen.gather_facts(options, linear.weight.shape[0], linear.compute, linear.shift, upstream)
    classes = _classes_per_slice(linear, chosen, facts)
    if classes is not None:
        return slices.gradients(linear, chosen, _schedule_of_gradients(linear, facts), norm, classes)
    schedule = Schedule(facts, linear.rows_per_chunk())
    run = chosen.row_pass(schedule.facts, Results(schedule.facts.weight, schedule.ordered(norm)))
    gradients = Gradients(linear, schedule, chosen)
    for chunk in _chunks(linear, chosen, schedule, iter(schedule)):
        run.backward(chunk.logits, chunk.part.start, chunk.logits, chunk.target_logits)
        gradients.add(chunk.part, chunk.hidden, chunk.logits)
    return gradients.result()


def _chunks(linear: Linear, chosen: Kernels, schedule: Schedule, parts: Iterator[Part]) -> Iterator[_Chunk]:
    compute, weight, bias = linear.compute, linear.classifier, linear.classifier_bias
    rows = min(schedule.step, schedule.count - schedule.first)
    memory = torch.empty(max(rows, 0), len(weight), dtype=compute, device=weight.device)
    target = schedule.facts.target
    for part in parts:
        hidden = part.take(linear.hidden).to(compute)
        logits = memory[: len(hidden)]
        linear.write_logits(hidden, logits)
        target_logits = None
        if target is not None and (compute in (torch.bfloat16, torch.float16) or chosen.tile_pass is not None):
            target_logits = chosen.target_logits(hidden, weight, bias, target[part.start : part.stop])
        yield _Chunk(part, hidden, logits, target_logits)


def _classes_per_slice(linear: Linear, chosen: Kernels, facts: Facts) -> int | None:
    """Return how many classes a slice of all rows has, None where gradients are better made of chunks of rows."""
    adds_up = linear.needs[1] and linear.compute == torch.bfloat16
    if not adds_up or chosen.tile_pass is None or facts.target is None:
        return None
    return classes_per_slice(len(linear.hidden), len(linear.weight), linear.rows_per_chunk())


def _schedule_of_gradients(linear: Linear, facts: Facts) -> Schedule:
    """Return the rows that have a gradient; others are computed for their statistics alone."""
    return Schedule(replace(facts, spec=replace(facts.spec, stats=())), linear.rows_per_chunk())


def _forward_in_tiles(linear: Linear, chosen: Kernels, facts: Facts, results: Results) -> bool:
    """Fill the results without all logits, if the device has kernels for that and each row has one class for target."""
    if chosen.tile_pass is None or facts.target is None or not len(facts.weight):
        return False
    weight, bias, hidden = linear.classifier, linear.classifier_bias, linear.hidden.to(linear.compute)
    run = chosen.tile_pass(facts, results, chosen.target_logits(hidden, weight, bias, facts.target))
    if bias is not None or not run.multiply(hidden, weight):
        _add_tiles(linear, hidden, run)
    run.finish()
    return True


def _add_tiles(linear: Linear, hidden: Tensor, run: Any) -> None:
    rows, classes = tile_shape(len(hidden), len(linear.weight), linear.compute.itemsize, linear.workspace)
    memory = torch.empty(rows * classes, dtype=linear.compute, device=hidden.device)
    for start in range(0, len(hidden), rows):
        some = hidden[start : start + rows]
        for first in range(0, len(linear.weight), classes):
            part = slice(first, min(first + classes, len(linear.weight)))
            tile = memory[: len(some) * (part.stop - first)].view(len(some), -1)
            linear.write_logits(some, tile, part)
            run.add(tile, start, first)
