"""`linear_cross_entropy` in PyTorch: fill chunks with the gradients of their logits, and multiply them back."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import slices
from xent.backends.torch.borrowed import add_first_rows, first_rows
from xent.backends.torch.chunk import chunk_maker, chunks, row_pitch
from xent.backends.torch.facts import Facts
from xent.backends.torch.gradients import Gradients, no_gradients
from xent.backends.torch.kernels import Exponentials, Kernels, kernels
from xent.backends.torch.options import Options
from xent.backends.torch.product_sum import rounds_sums
from xent.backends.torch.results import Results, new_results
from xent.backends.torch.schedule import Schedule
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

    def exponentials(self, chosen: Kernels, facts: Facts) -> Exponentials | None:
        """Return what makes exponentials that stand for the gradients of logits; None where nothing does."""
        if chosen.exponentials is None or self.bias is not None:
            return None
        return chosen.exponentials(self.classifier, facts)

    def rows_per_chunk(self, first: int = 0, pitch: int | None = None) -> int:
        """Return how many rows of logits are alive at one time, but for those `first`, each `pitch` elements long."""
        rounds = self.needs[1] and rounds_sums(self.compute, self.weight.dtype, self.weight.device)
        rows, length, itemsize = len(self.hidden) - first, pitch or len(self.weight), self.compute.itemsize
        return rows_per_chunk(rows, length, itemsize, self.workspace, self.weight.device.type, rounds)


def forward(linear: Linear, options: Options, keep_norm: bool) -> tuple[Facts, Results, list[Tensor]]:
    """Return facts and results of all rows, and gradients, unless the norm is kept for backward to make them."""
    chosen = kernels(options.kernel)
    facts = chosen.gather_facts(options, linear.weight.shape[0], linear.compute, linear.shift)
    wanted = not keep_norm and any(linear.needs)
    classes = _classes_per_slice(linear, chosen, facts) if wanted else None
    if classes is not None:
        results, schedule = new_results(facts, True), _schedule_of_gradients(linear, chosen, facts)
        _forward_in_tiles(linear, chosen, facts, results)
        assert results.norm is not None
        made = slices.gradients(linear, chosen, schedule, results.norm, classes)
        return facts, replace(results, norm=None), made
    if not wanted:
        results = new_results(facts, keep_norm)
        if _forward_in_tiles(linear, chosen, facts, results):
            return facts, results, no_gradients(linear)
    first, piece = first_rows(linear, chosen, facts) if wanted else (0, 0)
    exponentials = linear.exponentials(chosen, facts) if wanted else None
    pitch = row_pitch(linear, exponentials)
    schedule = Schedule(facts, linear.rows_per_chunk(first, pitch), chosen.computed_first, first)
    results = new_results(schedule.facts, keep_norm)
    maker = chunk_maker(linear, chosen, exponentials, schedule.facts, results, wanted)
    gradients = Gradients(linear, schedule, exponentials) if wanted else None
    parts = iter(schedule)
    if gradients is not None and first:
        add_first_rows(linear, chosen, schedule, parts, results, gradients, exponentials, piece)
    for chunk in chunks(linear, chosen, schedule, parts, pitch):
        factors = maker.forward(chunk)
        if gradients is not None:
            gradients.add(chunk.part, chunk.hidden, chunk.logits, factors)
    made = no_gradients(linear) if gradients is None else gradients.result()
    return facts, schedule.in_callers_order(results), made


def backward(upstream: Tensor, linear: Linear, norm: Tensor, options: Options) -> list[Tensor]:
    """Return the gradients for `upstream`, that of the rows' losses, from logits made again chunk by chunk."""
    chosen = kernels(options.kernel)
    facts = chosen.gather_facts(options, linear.weight.shape[0], linear.compute, linear.shift, upstream)
    classes = _classes_per_slice(linear, chosen, facts)
    if classes is not None:
        return slices.gradients(linear, chosen, _schedule_of_gradients(linear, chosen, facts), norm, classes)
    exponentials = linear.exponentials(chosen, facts)
    pitch = row_pitch(linear, exponentials)
    schedule = Schedule(facts, linear.rows_per_chunk(pitch=pitch), chosen.computed_first)
    results = Results(schedule.facts.weight, schedule.ordered(norm))
    maker = chunk_maker(linear, chosen, exponentials, schedule.facts, results)
    gradients = Gradients(linear, schedule, exponentials)
    for chunk in chunks(linear, chosen, schedule, iter(schedule), pitch):
        gradients.add(chunk.part, chunk.hidden, chunk.logits, maker.backward(chunk))
    return gradients.result()


def _classes_per_slice(linear: Linear, chosen: Kernels, facts: Facts) -> int | None:
    """Return how many classes a slice of all rows has, None where gradients are better made of chunks of rows."""
    adds_up = linear.needs[1] and linear.compute == torch.bfloat16
    if not adds_up or chosen.tile_pass is None or facts.target is None:
        return None
    return classes_per_slice(len(linear.hidden), len(linear.weight), linear.rows_per_chunk())


def _schedule_of_gradients(linear: Linear, chosen: Kernels, facts: Facts) -> Schedule:
    """Return the rows that have a gradient; others are computed for their statistics alone."""
    facts = replace(facts, spec=replace(facts.spec, stats=()))
    return Schedule(facts, linear.rows_per_chunk(), chosen.computed_first)


def _rounds_again(linear: Linear, chosen: Kernels, facts: Facts) -> bool:
    """Whether the logits that backward makes again are rounded: those that become exponentials are not."""
    return linear.exponentials(chosen, facts) is None or _classes_per_slice(linear, chosen, facts) is not None


def _forward_in_tiles(linear: Linear, chosen: Kernels, facts: Facts, results: Results) -> bool:
    """Fill the results without all logits, if the device has kernels for that and each row has one class for target."""
    if chosen.tile_pass is None or facts.target is None or not len(facts.weight):
        return False
    weight, bias, hidden = linear.classifier, linear.classifier_bias, linear.hidden.to(linear.compute)
    run = chosen.tile_pass(facts, results, chosen.target_logits(hidden, weight, bias, facts.target))
    rounded = results.norm is not None and _rounds_again(linear, chosen, facts)
    if bias is not None or not run.multiply(hidden, weight, rounded):
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
