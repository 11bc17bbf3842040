"""The row kernel made of MLX's own operations, in blocks that are small, so that intermediate arrays are too.

On a GPU MLX has a fused operation for the loss of class indices and one for its gradient, which reuses the logits'
memory: see `xent.backends.mlx.block.FusedBlock`. All other cases, and the CPU, use `xent.backends.mlx.block.Block`.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import mlx.core as mx

from xent.backends.mlx.block import Block, FusedBlock, fuses, needs_memory
from xent.backends.mlx.devices import device_type
from xent.backends.mlx.finish import coefficients, finish
from xent.backends.mlx.kernels import KERNELS, Kernels, Results, RowFacts, joined
from xent.core.chunks import rows_per_block

__all__ = ["backward", "forward", "target_gradient"]


def forward(logits: mx.array, facts: RowFacts, asked: Collection[str]) -> Results:
    """Compute a block of rows: see `xent.backends.mlx.kernels.Kernels.forward`."""
    parts: list[Results] = []

    def compute(block: Block, rows: slice) -> tuple[list[mx.array], mx.array | None]:
        sums, grad = block.fold(asked), None
        parts.append(finish(sums, block.facts, asked))
        if "grad" in asked:
            given = coefficients(block.facts, sums.peak + sums.log_sum, sums.target.total)
            grad = block.gradient(given, sums.peak, sums.log_sum)
        return list(parts[-1].values()), grad

    grad = _each(logits, facts, "grad" in asked and "entropy" not in asked, compute)
    return joined(parts) if grad is None else joined(parts) | {"grad": grad}


def backward(logits: mx.array, facts: RowFacts, norm: mx.array) -> mx.array:
    """Return a block's gradient: see `xent.backends.mlx.kernels.Kernels.backward`."""
    if "nll" in facts.upstream and facts.probabilities is not None and facts.class_weight is not None:
        # The nll of class probabilities does not include class weights.
        upstream = dict(facts.upstream)
        alone = {"nll": upstream.pop("nll")}
        plain = replace(facts, scale=mx.zeros_like(facts.scale), class_weight=None, upstream=alone)
        return backward(logits, plain, norm) + backward(logits, replace(facts, upstream=upstream), norm)

    def compute(block: Block, rows: slice) -> tuple[list[mx.array], mx.array]:
        peak, log_sum = norm[rows, 0], norm[rows, 1]
        given = coefficients(block.facts, peak + log_sum, block.shares())
        return [], block.gradient(given, peak, log_sum)

    grad = _each(logits, facts, True, compute)
    assert grad is not None
    return grad


def target_gradient(logits: mx.array, facts: RowFacts, norm: mx.array) -> mx.array:
    """Return the gradient (R, V) of a block's class probabilities, from the logits and the result norm (R, 2)."""
    grad = _each(logits, facts, True, lambda block, rows: ([], block.target_gradient(norm[rows])))
    assert grad is not None
    return grad


KERNELS["mlx"] = Kernels(forward, backward)


def _each(
    logits: mx.array,
    facts: RowFacts,
    grad_only: bool,
    compute: Callable[[Block, slice], tuple[list[mx.array], mx.array | None]],
) -> mx.array | None:
    """Call `compute` for each part of the rows, which returns (results, gradient). Return the gradient of all rows.

    MLX writes a part of it in place if nothing else refers to it. So each part depends on the one before.
    """
    whole, tie = None, list[mx.array]()
    for rows in _parts(logits, facts, grad_only):
        alone = rows.stop - rows.start == len(logits)
        z, some = (logits, facts) if alone else (logits[rows], facts.part(rows))
        kind = FusedBlock if fuses(z, some) else Block
        results, grad = compute(kind(mx.depends(z, tie) if tie else z, some), rows)
        if grad is None:
            tie = results
            continue
        tie = [*results, grad]
        if alone:
            return grad
        whole = mx.zeros(logits.shape, grad.dtype) if whole is None else whole
        whole[rows] = grad
    return whole


def _parts(logits: mx.array, facts: RowFacts, grad_only: bool) -> Iterator[slice]:
    """Yield parts of the rows that are so small that intermediate arrays take little memory.

    A block is not split if it is small, or if it is the whole call and has no intermediate arrays: then the pieces of
    the gradient and their concatenation would take twice the memory.
    """
    count, vocabulary = logits.shape
    step = rows_per_block(vocabulary, facts.weight.dtype.size, device_type(), 1)
    fused = fuses(logits, facts)
    as_they_are = facts.target is not None and not needs_memory(facts) and (fused or logits.dtype == facts.weight.dtype)
    if as_they_are and (fused or (facts.alone and grad_only)):
        step = count
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
