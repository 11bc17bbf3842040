"""A chunk of rows of `linear_cross_entropy`: logits that a row pass makes gradients of, or exponentials instead."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xent.backends.protocol import RowPass
from xent.backends.torch.facts import Facts
from xent.backends.torch.kernels import Exponentials, Factors, Kernels, Piece
from xent.backends.torch.results import Results
from xent.backends.torch.schedule import Part, Schedule

if TYPE_CHECKING:
    from xent.backends.torch.linear import Linear

__all__ = ["Chunk", "chunk_maker", "chunks", "row_pitch"]

_ALIGNED = 16  # bytes


@dataclass(frozen=True, eq=False)
class Chunk:
    """R rows, in the compute dtype."""

    part: Part
    hidden: Tensor
    """(R, D)"""
    logits: Tensor
    """(R, V), memory that the next chunk uses again; nothing is in it yet."""
    target_logits: Tensor | None
    """(R,) float32, where the compute dtype rounds: most of the loss's error is the rounding of this one logit.

    Also where the forward pass may have come from tiles: other products round otherwise, and this one logit must be
    the same in both passes if p of a sure target, or of an only class, is to be 1.
    """


def row_pitch(linear: "Linear", exponentials: Exponentials | None) -> int:
    """Return how many elements a row of a chunk takes: exponentials are written in rows on boundaries of 16 bytes."""
    unit = 1 if exponentials is None else _ALIGNED // linear.compute.itemsize
    return -(-len(linear.weight) // unit) * unit


def chunks(linear: "Linear", chosen: Kernels, schedule: Schedule, parts: Iterator[Part], pitch: int) -> Iterator[Chunk]:
    """Yield the chunk of each part that is left."""
    compute, weight, bias = linear.compute, linear.classifier, linear.classifier_bias
    rows = min(schedule.step, schedule.count - schedule.first)
    memory = torch.empty(max(rows, 0), pitch, dtype=compute, device=weight.device)[:, : len(weight)]
    target = schedule.facts.target
    for part in parts:
        hidden = part.take(linear.hidden).to(compute)
        target_logits = None
        if target is not None and (compute in (torch.bfloat16, torch.float16) or chosen.tile_pass is not None):
            target_logits = chosen.target_logits(hidden, weight, bias, target[part.start : part.stop])
        yield Chunk(part, hidden, memory[: len(hidden)], target_logits)


def chunk_maker(
    linear: "Linear",
    chosen: Kernels,
    exponentials: Exponentials | None,
    facts: Facts,
    results: Results,
    wanted: bool = True,
) -> "_ByRowPass | _ByExponentials":
    """Return what fills chunks of these rows, and with gradients if they are wanted, as exponentials always are."""
    if exponentials is None:
        return _ByRowPass(linear, chosen.row_pass(facts, results), wanted)
    return _ByExponentials(linear, exponentials, facts, results)


@dataclass(frozen=True)
class _ByRowPass:
    linear: "Linear"
    run: RowPass
    wanted: bool

    def forward(self, chunk: Chunk) -> None:
        """Make the logits, find their results, and overwrite them with their gradient if that is wanted."""
        self.linear.write_logits(chunk.hidden, chunk.logits)
        self.run.forward(chunk.logits, chunk.part.start, chunk.logits if self.wanted else None, chunk.target_logits)

    def backward(self, chunk: Chunk) -> None:
        """Make the logits again and overwrite them with their gradient."""
        self.linear.write_logits(chunk.hidden, chunk.logits)
        self.run.backward(chunk.logits, chunk.part.start, chunk.logits, chunk.target_logits)


@dataclass(frozen=True)
class _ByExponentials:
    linear: "Linear"
    exponentials: Exponentials
    facts: Facts
    results: Results

    def forward(self, chunk: Chunk) -> Factors:
        """Make the exponentials, and find the results."""
        start, stop = chunk.part.start, chunk.part.stop
        facts, results = self.facts.between(start, stop), self.results.between(start, stop)
        assert chunk.target_logits is not None
        return self.exponentials.make(chunk.hidden, [self._piece(chunk)], facts, results, chunk.target_logits)

    def backward(self, chunk: Chunk) -> Factors:
        """Make the exponentials from the norm."""
        start, stop = chunk.part.start, chunk.part.stop
        facts, norm = self.facts.between(start, stop), self.results.between(start, stop).norm
        assert norm is not None
        assert chunk.target_logits is not None
        return self.exponentials.make_again(chunk.hidden, [self._piece(chunk)], facts, norm, chunk.target_logits)

    def _piece(self, chunk: Chunk) -> Piece:
        return 0, self.linear.classifier, chunk.logits
