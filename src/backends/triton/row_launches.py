"""Launches of the kernels for whole rows of stored logits, in blocks of rows with regular strides."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.rows import logit_blocks
from xent.backends.triton.facts import Facts, is_quick
from xent.backends.triton.geometry import Geometry, geometry, rows_of, sizes
from xent.backends.triton.gradient_kernel import gradient_kernel
from xent.backends.triton.launch import cdiv, is_interpreted, launch, next_power_of_2
from xent.backends.triton.machine import multiprocessors
from xent.backends.triton.probabilities_kernel import probabilities_kernel
from xent.backends.triton.results import Results
from xent.backends.triton.row_exchange import BOTH, GRADIENTS, SUMS, WORDS
from xent.backends.triton.rows_kernel import rows_kernel
from xent.backends.triton.support_kernel import support_kernel

__all__ = ["Block", "blocks_of", "launch_gradient", "launch_probabilities", "launch_rows", "launch_support"]

# Multiprocessors of a GPU on which programs share rows. A launch has at most 7 programs that wait for others to start.
# So four launches in different streams leave room for one more program.
_LEAST = 32
_GRADIENT_BYTES, _GRADIENT_BLOCKS = 4 * 2**10, 4  # bytes of a block, and blocks of a program


@dataclass(frozen=True)
class Block:
    """The rows of logits (..., V) of one launch, and the buffer of their gradient."""

    logits: Tensor
    grad: Tensor | None
    place: Geometry
    start: int
    """The index of the first row, in the order of the call or in `order`."""
    order: Tensor | None = None
    """(N,) int64, the order in which rows are computed; None for the order of the call."""
    target_logits: Tensor | None = None
    """(R,) float32, replaces the targets' raw logits; or None."""

    @property
    def memory(self) -> tuple[Any, ...]:
        """The kernel arguments for logits and gradient."""
        place = self.place
        return self.logits, *place.logits, place.skew, self.grad, *place.grad

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.logits.shape[:-1].numel()


def blocks_of(logits: Tensor, grad: Tensor | None) -> Iterator[Block]:
    """Yield all rows of logits (..., V): as one block if a single launch can address them."""
    place = geometry(logits, grad)
    if place is not None:
        yield Block(logits, grad, place, 0)
        return
    for start, block, out in logit_blocks(logits, grad):
        found = geometry(block, out)
        assert found is not None
        yield Block(block, out, found, start)


def launch_rows(facts: Facts, results: Results, block: Block, norm: Tensor | None) -> None:
    """Fold and finish the rows of a block. Write their gradient if `block.grad` is given, and `norm` if it is given."""
    spec, place, logits = facts.spec, block.place, block.logits
    loss, statistics = results.loss, results.statistics
    predicts, capped = "predictions" in spec.stats or "accuracy" in spec.stats, spec.softcap is not None
    programs, upstreams = block.count, facts.upstreams
    if not programs:
        return
    half = logits.itemsize == 2
    smoothed, few = spec.label_smoothing != 0, facts.divides_few()
    in_turn = is_interpreted(rows_kernel)
    shares = not smoothed and (in_turn or multiprocessors(facts.device) >= _LEAST)
    size = sizes(facts.vocabulary, logits.itemsize, place, block.grad is not None, predicts, capped, shares)
    words = None
    if size.parts > 1:
        words = torch.zeros(programs * size.parts * WORDS, dtype=torch.int64, device=facts.device)
    # Programs that run one after the other cannot wait for each other.
    for phase in (SUMS, GRADIENTS) if in_turn and words is not None else (BOTH,):
        launch(
            rows_kernel,
            programs * size.parts,
            (
                *block.memory,
                block.order,
                block.start,
                facts.target,
                facts.sample_weight,
                facts.class_weight,
                facts.total_weight if smoothed else None,
                block.target_logits,
                *upstreams,
                facts.scratch,
                loss,
                norm,
                *statistics,
                *facts.rows,
                *facts.numbers,
                words,
                size.share,
            ),
            {
                "MEAN": facts.mean,
                "FEW": few,
                "ALL_ROWS": facts.all_rows,
                **place.constants(),
                "EXACT": not half,
                "QUICK": is_quick(spec, facts.bend, facts.vocabulary, half),
                "FOLDS": half and facts.upstream.entropy is None,
                "SMOOTHED": smoothed,
                "Z_LOSS": spec.z_loss != 0,
                **facts.constants,
                **size.constants(),
                "PARTS": size.parts,
                "PHASE": phase,
            },
            **size.options,
            **place.options(),
        )


def launch_gradient(facts: Facts, block: Block, norm: Tensor, entropy: Tensor | None) -> None:
    """Write the gradient of a block's rows from the norm, and the entropy if it has an upstream gradient."""
    spec, place, logits, half = facts.spec, block.place, block.logits, block.logits.itemsize == 2
    if not block.count:
        return
    size = max(min(next_power_of_2(facts.vocabulary), _GRADIENT_BYTES // logits.itemsize), 2 * place.vector)
    blocks = max(min(_GRADIENT_BLOCKS, cdiv(facts.vocabulary, size)), 1)
    spare = place.vector - 1 if place.skewed else 0
    smoothed = spec.label_smoothing != 0
    launch(
        gradient_kernel,
        block.count * cdiv(facts.vocabulary + spare, blocks * size),
        (
            *block.memory,
            block.start,
            facts.target,
            facts.sample_weight,
            facts.class_weight,
            facts.total_weight if smoothed else None,
            *facts.upstreams,
            facts.scratch,
            norm,
            entropy,
            *facts.rows,
            *facts.numbers,
        ),
        {
            "MEAN": facts.mean,
            **place.constants(),
            "EXACT": not half,
            "QUICK": is_quick(spec, facts.bend, facts.vocabulary, half),
            "SMOOTHED": smoothed,
            "Z_LOSS": spec.z_loss != 0,
            **facts.constants,
            "BLOCK": size,
            "BLOCKS": blocks,
        },
        num_warps=max(size * logits.itemsize // 1024, 1),
        maxnreg=64,
        **place.options(),
    )


def launch_probabilities(facts: Facts, results: Results, block: Block) -> None:
    """Fold and finish the rows of a block, and write their gradient if `block.grad` is not None."""
    given, place = facts.probabilities, block.place
    assert given is not None
    rows = rows_of(given)
    if rows is None:
        given = given.contiguous()
        rows = rows_of(given)
    assert rows is not None
    loss, statistics = results.loss, results.statistics
    if not block.count:
        return
    launch(
        probabilities_kernel,
        block.count,
        (
            block.logits,
            *place.logits,
            block.grad,
            *place.grad,
            block.order,
            block.start,
            given,
            *rows,
            given.stride(-1),
            facts.sample_weight,
            facts.class_weight,
            *facts.upstreams,
            facts.scratch,
            loss,
            *statistics,
            facts.count,
            facts.length,
            facts.shift,
            facts.vocabulary,
            *facts.numbers,
        ),
        {
            "GROUPED": place.grouped or rows[0] < facts.count,
            "MEAN": facts.mean,
            "ALL_ROWS": facts.all_rows,
            **facts.constants,
            "BLOCK": min(next_power_of_2(facts.vocabulary), 1024),
        },
        num_warps=4,
    )


def launch_support(facts: Facts, results: Results, block: Block) -> None:
    """Fold and finish the rows of a block, and write their gradient if `block.grad` is not None."""
    support, place = facts.support, block.place
    assert support is not None
    loss, statistics = results.loss, results.statistics
    if not block.count:
        return
    launch(
        support_kernel,
        block.count,
        (
            *block.memory,
            block.order,
            block.start,
            *support,
            len(support[0]),
            None if block.grad is None else results.held(len(support[0])),
            facts.target,
            block.target_logits,
            *facts.upstreams,
            loss,
            *statistics,
            *facts.rows,
            *facts.scales,
        ),
        {
            **place.constants(),
            **facts.constants,
            "BLOCK": max(min(next_power_of_2(facts.vocabulary), 1024), 2 * place.vector),
        },
        num_warps=4,
    )
