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
from xent.backends.mlx.kernels import Facts, Results, finish, joined
from xent.core.call import Allowed

__all__ = ["backward", "forward", "target_gradient"]

_Compute = Callable[[Block, Any], tuple[list[mx.array], mx.array | None]]
"""Maps a block and its rows, a slice or indices, to (results, gradient)."""


def forward(logits: mx.array, facts: Facts, requested: Collection[str]) -> Results:
    """Compute a block of rows: see `xent.backends.mlx.kernels`."""
    parts: list[Results] = []

    def compute(block: Block, rows: slice | mx.array) -> tuple[list[mx.array], mx.array | None]:
        sums, grad = block.fold(requested), None
        parts.append(finish(sums, block.facts) | ({} if isinstance(rows, slice) else {"order": rows}))
        if "grad" in requested:
            grad = block.gradient(sums.peak, sums.log_sum)
        return list(parts[-1].values()), grad

    grad = _each(logits, facts, "grad" in requested and "entropy" not in requested, compute)
    results = joined(parts)
    if "order" in results:
        back = mx.argsort(results.pop("order"))
        results = {name: value[back] for name, value in results.items()}
    return results if grad is None else results | {"grad": grad}


def backward(logits: mx.array, facts: Facts, norm: mx.array) -> mx.array:
    """Return a block's gradient: see `xent.backends.mlx.kernels`."""
    grad: mx.array = _each(logits, facts, True, lambda block, rows: ([], block.gradient(*norm[rows].T)))
    return grad


def target_gradient(logits: mx.array, facts: Facts, norm: mx.array) -> mx.array:
    """Return the gradient (R, V) of a block's class probabilities, from the logits and the result norm (R, 2)."""
    grad: mx.array = _each(logits, facts, True, lambda block, rows: ([], block.target_gradient(norm[rows])))
    return grad


def _each(
    logits: mx.array,
    facts: Facts,
    grad_only: bool,
    compute: _Compute,
) -> Any:
    """Call `compute` for each part of the rows, which returns (results, gradient). Return the gradient of all rows.

    Parts are so small that intermediate arrays take little memory. A block is not split if it is small, or if it is the
    whole call and has no intermediate arrays: then the pieces of the gradient and their concatenation would take twice
    the memory. MLX writes a part of the gradient in place if nothing else refers to it. So each part depends on the one
    before.
    """
    if facts.sets is not None:
        return _each_set(logits, facts, facts.sets, compute)
    (count, vocabulary), whole, tie = logits.shape, None, list[mx.array]()
    step, fused = _step(vocabulary, facts), fuses(logits, facts)
    as_they_are = facts.target is not None and not needs_memory(facts) and (fused or logits.dtype == facts.weight.dtype)
    if as_they_are and (fused or (facts.whole_call and grad_only)):
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


def _step(width: int, facts: Facts) -> int:
    """Return the rows of a block with `width` elements a row, which should stay in the caches."""
    return max((2**21 if device_type() == "cpu" else 2**28) // (width * facts.weight.dtype.size), 1)


def _each_set(logits: mx.array, facts: Facts, sets: mx.array, compute: _Compute) -> mx.array | None:
    """Call `compute` for blocks of rows with supports, of which only the logits in the support are read.

    The size of a support is not known while MLX records operations. But of M classes in all, the support of rank i by
    size, from 1, has at most M / i. So the rows are sorted, and a block has those of ranks i to 2i - 1, padded to M / i
    classes: at most M log2(R) in all. The last column is padding, and stands for a target outside of its support.
    """
    assert isinstance(facts.call.target, Allowed)
    assert facts.target is not None
    (count, vocabulary), classes, grad, tie = logits.shape, facts.call.target.classes, None, list[mx.array]()
    order, start, columns = mx.argsort(sets[:, 0] - sets[:, 1]), 0, mx.arange(vocabulary + 1, dtype=mx.int32)
    while start < count:
        width = min(len(classes) // (start + 1), vocabulary)
        step = _step(width + 1, facts)
        rows = order[start : min(start + step, 2 * start + 1, count)]
        start += len(rows)
        tied = mx.depends(rows, tie) if tie else rows
        column = columns[: width + 1]
        place = sets[tied, :1] + column
        ids = mx.where(place < sets[tied, 1:], classes[mx.clip(place, 0, len(classes) - 1)], -1)
        at = rows[:, None], mx.maximum(ids, 0)
        target = mx.argmax((ids == facts.target[tied, None]) | (column == width), axis=-1)
        results, part = compute(Block(logits[at], replace(facts.part(tied), target=target, ids=ids)), rows)
        tie = results
        if part is not None:
            tie = [*results, part]
            if grad is None:
                nothing = mx.where(sets[:, 0] < 0, mx.nan, 0).astype(part.dtype)
                grad = mx.broadcast_to(nothing[:, None], logits.shape)
            grad = grad.at[at].add(part)
    return grad
