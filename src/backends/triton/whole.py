"""Launches of `rows_kernel`: whole rows of stored logits, in blocks of rows with regular strides."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Part
from xent.backends.torch.memory import logit_blocks
from xent.backends.triton.geometry import Geometry, geometry, sizes
from xent.backends.triton.groups import Columns, Results, Way
from xent.backends.triton.inputs import Inputs
from xent.backends.triton.kernels.exchange import BOTH, GRADIENTS, SUMS, WORDS
from xent.backends.triton.kernels.rows_kernel import rows_kernel
from xent.backends.triton.machine import multiprocessors
from xent.backends.triton.prepared import is_interpreted, launch

__all__ = ["Placed", "placed", "whole_rows"]

# Multiprocessors of a GPU on which programs share rows. A launch has at most 7 programs that wait for others to start.
# So four launches in different streams leave room for one more program.
_LEAST = 32


@dataclass(eq=False, slots=True)
class Placed:
    """Rows of logits (..., V) that one launch can address."""

    logits: Tensor
    grad: Tensor | None
    place: Geometry
    start: int
    """The first row, relative to the part's."""

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.logits.shape[:-1].numel()

    @property
    def memory(self) -> tuple[Any, ...]:
        """The kernel arguments for logits and gradient."""
        place = self.place
        return self.logits, *place.logits, place.skew, self.grad, *place.grad


def placed(block: Block) -> Iterator[Placed]:
    """Yield the rows of a block: all at once if a single launch can address them."""
    place = geometry(block.logits, block.grad)
    if place is not None:
        yield Placed(block.logits, block.grad, place, block.start)
        return
    for start, logits, grad in logit_blocks(block.logits, block.grad):
        found = geometry(logits, grad)
        assert found is not None
        yield Placed(logits, grad, found, block.start + start)


def whole_rows(inputs: Inputs, recorded: Results, block: Block, part: Part, saved: Tensor | None) -> None:
    """Fold and finish rows of class targets. Write their gradient to `block.grad`, and what it needs to `saved`."""
    for rows in placed(block):
        if rows.count:
            _launch(inputs, recorded, rows, part, block.target_logits, saved)


def _launch(
    inputs: Inputs,
    recorded: Results,
    block: Placed,
    part: Part,
    target_logits: Tensor | None,
    saved: Tensor | None,
) -> None:
    place, logits, vocabulary = block.place, block.logits, inputs.vocabulary
    predicts = recorded.predictions is not None or recorded.hits is not None
    mixes = inputs.way["tilted"] or recorded.entropy is not None
    half = logits.itemsize == 2
    in_turn = is_interpreted(rows_kernel)
    shares = not inputs.smoothed and (in_turn or multiprocessors(inputs.device) >= _LEAST)
    size = sizes(vocabulary, logits.itemsize, place, block.grad is not None, predicts, inputs.capped, shares)
    programs = block.count * size.parts
    words = None
    if size.parts > 1:
        words = torch.zeros(programs * WORDS + 1, dtype=torch.int64, device=inputs.device)
    rows, start = inputs.rows_of(part, block.start)
    # Programs that run one after the other cannot wait for each other.
    for phase in (SUMS, GRADIENTS) if in_turn and words is not None else (BOTH,):
        launch(
            rows_kernel,
            programs,
            (
                *block.memory,
                target_logits,
                saved,
                words,
                rows,
                inputs.upstreams,
                recorded,
                start,
                inputs.count,
                inputs.ignore_index,
                vocabulary,
                *inputs.weights,
                *inputs.scales,
                size.share,
            ),
            {
                "columns": Columns() if saved is None else inputs.columns,
                "way": Way(
                    **inputs.way,
                    entropy=mixes or (saved is not None and inputs.columns.mixed >= 0),
                    squared=recorded.log_sum_sq_probs is not None,
                    averaged=recorded.mean_logit is not None,
                    predicted=predicts,
                    exact=not half,
                    quick=inputs.quick(half),
                    folds=half and not inputs.way["tilted"],
                    phase=phase,
                    **place.constants(),
                    **size.constants(),
                ),
            },
            **size.options,
            **place.options(),
        )
