"""The row kernel made of MLX's own operations, in blocks that are small, so that intermediate arrays are too.

On a GPU MLX has a fused operation for the loss of class indices and one for its gradient, which reuses the logits'
memory: see `xent.backends.mlx.block.FusedBlock`. All other cases, and the CPU, use `xent.backends.mlx.block.Block`.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import mlx.core as mx

from xent.backends.mlx.block import Block, FusedBlock, fuses, needs_memory
from xent.backends.mlx.devices import device_type
from xent.backends.mlx.kernels import Facts, Results, coefficients, finish, joined
from xent.core.chunks import rows_per_block

__all__ = ["backward", "forward", "target_gradient"]


def forward(logits: mx.array, facts: Facts, asked: Collection[str]) -> Results:
    """Compute a block of rows: see `xent.backends.mlx.kernels`."""
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


def backward(logits: mx.array, facts: Facts, norm: mx.array) -> mx.array:
    """Return a block's gradient: see `xent.backends.mlx.kernels`."""
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

    grad: mx.array = _each(logits, facts, True, compute)
    return grad


def target_gradient(logits: mx.array, facts: Facts, norm: mx.array) -> mx.array:
    """Return the gradient (R, V) of a block's class probabilities, from the logits and the result norm (R, 2)."""
    grad: mx.array = _each(logits, facts, True, lambda block, rows: ([], block.target_gradient(norm[rows])))
    return grad


def _each(
    logits: mx.array,
    facts: Facts,
    grad_only: bool,
    compute: Callable[[Block, slice], tuple[list[mx.array], mx.array | None]],
) -> Any:
    """Call `compute` for each part of the rows, which returns (results, gradient). Return the gradient of all rows.

    Parts are so small that intermediate arrays take little memory. A block is not split if it is small, or if it is the
    whole call and has no intermediate arrays: then the pieces of the gradient and their concatenation would take twice
    the memory. MLX writes a part of the gradient in place if nothing else refers to it. So each part depends on the one
    before.
    """
    (count, vocabulary), whole, tie = logits.shape, None, list[mx.array]()
    step, fused = rows_per_block(vocabulary, facts.weight.dtype.size, device_type(), 1), fuses(logits, facts)
    as_they_are = facts.target is not None and not needs_memory(facts) and (fused or logits.dtype == facts.weight.dtype)
    if as_they_are and (fused or (facts.alone and grad_only)):
        step = count
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        z = logits if step >= count else logits[rows]
        block = (FusedBlock if fused else Block)(mx.depends(z, tie) if tie else z, facts.part(rows))
        results, grad = compute(block, rows)
        if grad is None:
            tie = results
            continue
        tie = [*results, grad]
        if step >= count:
            return grad
        whole = mx.zeros(logits.shape, grad.dtype) if whole is None else whole
        whole[rows] = grad
    return whole
