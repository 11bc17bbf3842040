"""The first rows of `linear_cross_entropy`, whose logits lie in the memory of the classifier's gradient.

Nobody needs that memory before the first product that makes the gradient, and of D rows the logits are as large as it.
They are cut into pieces of some classes, each a little further back than the slice of the gradient that takes its
place: the memory of a slice is that of the piece before, which is done with. So these rows need no memory for logits
but one piece, and their part of the gradient no sum::

    gradient  | slice 0 | slice 1 | slice 2 | ... | slice n |
    logits              | piece 0 | piece 1 | ... | piece n - 1 |   piece n: apart

A row's norm comes from the pieces as they are made, like that of tiles; its gradient when all are there. Exponentials
take the place of both where a device makes them.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xent.backends.torch.chunk import row_pitch
from xent.backends.torch.facts import Facts
from xent.backends.torch.gradients import Gradients
from xent.backends.torch.kernels import Exponentials, Factors, Kernels, joined
from xent.backends.torch.product_sum import ProductSum, kept_dtype
from xent.backends.torch.results import Results
from xent.backends.torch.schedule import Part, Schedule
from xent.core.chunks import rows_in_gradient, tile_shape

if TYPE_CHECKING:
    from xent.backends.torch.linear import Linear

__all__ = ["Borrowed", "add_first_rows", "first_rows"]


def first_rows(linear: "Linear", chosen: Kernels, facts: Facts) -> tuple[int, int]:
    """Return how many first rows' logits lie in the classifier's gradient, 0 for none, and how many classes a piece.

    None unless that gradient is made in the dtype of the logits, and a device has kernels for tiles.
    """
    same_dtype = linear.needs[1] and kept_dtype(linear.weight.dtype) == linear.compute
    if not same_dtype or chosen.tile_pass is None or facts.target is None:
        return 0, 0
    rows, columns = linear.hidden.shape
    size, chunk = linear.compute.itemsize, linear.rows_per_chunk()
    return rows_in_gradient(rows, columns, len(linear.weight), size, chunk, linear.workspace)


def add_first_rows(
    linear: "Linear",
    chosen: Kernels,
    schedule: Schedule,
    parts: Iterator[Part],
    results: Results,
    gradients: Gradients,
    exponentials: Exponentials | None,
    classes: int,
) -> None:
    """Compute the schedule's first rows, whose parts come from `parts`, with pieces of so many classes."""
    first = Borrowed(linear, chosen, schedule.facts, results, exponentials, schedule.first, classes)
    for part in parts:
        first.add(part, part.take(linear.hidden).to(linear.compute))
        if part.stop == schedule.first:
            break
    schedule.learn_count()
    first.finish(schedule.until(schedule.first), gradients)


class Borrowed:
    """Up to `rows` first rows of a schedule with these facts and results, `classes` classes a piece."""

    def __init__(
        self,
        linear: "Linear",
        chosen: Kernels,
        facts: Facts,
        results: Results,
        exponentials: Exponentials | None,
        rows: int,
        classes: int,
    ) -> None:
        self._linear, self._chosen, self._facts = linear, chosen, facts
        weight, count = linear.weight, len(facts.weight)
        vocabulary = len(weight)
        # The first is the one that may be smaller: no piece lies in its place.
        stops = range(vocabulary - (math.ceil(vocabulary / classes) - 1) * classes, vocabulary + 1, classes)
        self._slices = [slice(max(stop - classes, 0), stop) for stop in stops]
        self._gradient = torch.empty(weight.shape, dtype=linear.compute, device=weight.device)
        self._apart = self._gradient.new_empty(rows * classes)
        norm = facts.weight.new_empty(2, count) if results.norm is None else results.norm
        self._results = replace(results, norm=norm)
        self._target_logits = facts.weight.new_zeros(count)
        # The rows of a piece lie one after the other, with no room between them.
        self._exponentials = exponentials if row_pitch(linear, exponentials) == vocabulary else None
        self._factors: list[Factors] = []
        assert chosen.tile_pass is not None
        self._tiles = chosen.tile_pass(facts, self._results, self._target_logits)

    def add(self, part: Part, hidden: Tensor) -> None:
        """Make the logits of a part from its hidden states (R, D), or their exponentials."""
        linear, rows = self._linear, slice(part.start, part.stop)
        assert self._facts.target is not None
        target = self._facts.target[rows]
        self._target_logits[rows] = self._chosen.target_logits(
            hidden, linear.classifier, linear.classifier_bias, target
        )
        if self._exponentials is not None:
            places = [(classes.start, linear.classifier[classes], piece) for classes, piece in self._pieces(rows)]
            facts = self._facts.between(part.start, part.stop)
            results = self._results.between(part.start, part.stop)
            self._factors.append(self._exponentials.make(hidden, places, facts, results, self._target_logits[rows]))
            return
        width = tile_shape(len(hidden), len(linear.weight), linear.compute.itemsize, None)[1]
        for classes, piece in self._pieces(rows):
            for first in range(classes.start, classes.stop, width):
                some = slice(first, min(first + width, classes.stop))
                tile = piece[:, some.start - classes.start : some.stop - classes.start]
                linear.write_logits(hidden, tile, some)
                self._tiles.add(tile, part.start, first)

    def finish(self, part: Part, gradients: Gradients) -> None:
        """Turn the logits of all parts, which are now one, into gradients, and begin the sums with them."""
        factors = joined(self._factors).between(0, part.stop) if self._factors else None
        if factors is None:
            self._tiles.finish()
        linear, facts, norm = self._linear, self._facts, self._results.norm
        hidden = part.take(linear.hidden).to(linear.compute)
        trained = gradients.trained(part, hidden, factors)
        target_logits = self._target_logits[: part.stop]
        needs_input, _, needs_bias = linear.needs
        total = ProductSum(hidden.shape, linear.compute, linear.input.dtype, hidden.device, chunks=None)
        bias = facts.weight.new_empty(len(linear.weight)) if needs_bias else None
        for classes, piece in self._pieces(slice(0, part.stop)):
            if factors is None:
                run = self._chosen.row_pass(facts.of_classes(classes.start, classes.stop), Results(facts.weight, norm))
                run.backward(piece, 0, piece, target_logits)
            if needs_input:
                total.add(piece, linear.classifier[classes], classes.stop == len(linear.weight))
            if bias is not None:
                bias[classes] = piece.sum(0, dtype=bias.dtype)
            torch.mm(piece.t(), trained, out=self._gradient[classes])
        gradients.begin(part, total.unrounded() if needs_input else None, self._gradient, bias, factors)

    def _pieces(self, rows: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield classes and the logits (R, C) of those rows."""
        for here, behind in zip(self._slices, [*self._slices[1:], None], strict=True):
            memory = self._apart if behind is None else self._gradient[behind].view(-1)
            width = here.stop - here.start
            yield here, memory[rows.start * width : rows.stop * width].view(-1, width)
