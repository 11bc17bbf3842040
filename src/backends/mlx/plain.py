"""The row kernel made of MLX's own operations, in blocks that are small, so that intermediate arrays are too.

On a GPU MLX has a fused operation for the loss of class indices and one for its gradient, which reuses the logits'
memory: see `fused`. All other cases, and the CPU, use `block`.
"""

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx

from xent.backends.mlx.block import Block
from xent.backends.mlx.devices import device_type
from xent.backends.mlx.finish import coefficients, finish
from xent.backends.mlx.fused import FusedBlock, fuses, needs_memory
from xent.backends.mlx.kernels import KERNELS, Asked, Found, Kernels, RowFacts, joined
from xent.core.chunks import rows_per_block

__all__ = ["backward", "forward"]


def forward(logits: mx.array, facts: RowFacts, asked: Asked) -> Found:
    """Compute a block of rows: see `xent.backends.mlx.kernels.Kernels.forward`."""
    parts, grad, tie = [], None, list[mx.array]()
    for start, z, some in _parts(logits, facts, asked.grad and not asked.entropy):
        block = _block(z, some, tie)
        sums = block.fold(asked)
        found = finish(sums, some, asked)
        if asked.grad:
            given = coefficients(some, sums.peak + sums.log_sum, sums.target.total)
            found = replace(found, grad=block.gradient(given, sums.peak, sums.log_sum))
        tie = found.arrays()
        grad = _placed(grad, found.grad, start, logits)
        parts.append(replace(found, grad=None))
    return replace(joined(parts), grad=grad)


def backward(logits: mx.array, facts: RowFacts, norm: mx.array) -> mx.array:
    """Return a block's gradient: see `xent.backends.mlx.kernels.Kernels.backward`."""
    if "nll" in facts.upstream and facts.probabilities is not None and facts.class_weight is not None:
        # The nll of class probabilities does not include class weights.
        upstream = dict(facts.upstream)
        alone = {"nll": upstream.pop("nll")}
        plain = replace(facts, scale=mx.zeros_like(facts.scale), class_weight=None, upstream=alone)
        return backward(logits, plain, norm) + backward(logits, replace(facts, upstream=upstream), norm)
    grad, tie = None, list[mx.array]()
    for start, z, some in _parts(logits, facts, True):
        peak, log_sum = norm[start : start + len(z), 0], norm[start : start + len(z), 1]
        block = _block(z, some, tie)
        made = block.gradient(coefficients(some, peak + log_sum, block.total()), peak, log_sum)
        tie = [made]
        grad = _placed(grad, made, start, logits)
    assert grad is not None
    return grad


KERNELS["mlx"] = Kernels(forward, backward)


def _parts(logits: mx.array, facts: RowFacts, grad_only: bool) -> Iterator[tuple[int, mx.array, RowFacts]]:
    """Yield (first row, logits, facts) of parts that are so small that intermediate arrays take little memory.

    A block is not split if it is small, or if it is the whole call and has no intermediate arrays: then the pieces of
    the gradient and their concatenation would take twice the memory.
    """
    count, vocabulary = logits.shape
    step = rows_per_block(vocabulary, facts.weight.dtype.size, device_type(), 1)
    fused = fuses(logits, facts)
    as_they_are = facts.target is not None and not needs_memory(facts) and (fused or logits.dtype == facts.weight.dtype)
    if count <= step or (as_they_are and (fused or (facts.alone and grad_only))):
        yield 0, logits, facts
        return
    for start in range(0, count, step):
        yield start, logits[start : start + step], facts.part(start, start + step)


def _placed(grad: mx.array | None, block: mx.array | None, start: int, like: mx.array) -> mx.array | None:
    """Return the gradient with a block's rows written to it.

    MLX does so in place if nothing else refers to the gradient; blocks are made to depend on each other for that.
    """
    if block is None or block.shape == like.shape:
        return block
    place = mx.zeros(like.shape, like.dtype) if grad is None else grad
    place[start : start + len(block)] = block
    return place


def _block(z: mx.array, facts: RowFacts, tie: list[mx.array]) -> Block:
    """Return a block of rows that is computed after `tie`."""
    kind = FusedBlock if fuses(z, facts) else Block
    return kind(mx.depends(z, tie) if tie else z, facts)
