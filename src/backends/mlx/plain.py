"""The row kernel made of MLX's own operations, in blocks small enough that what is computed on the way takes little.

On a GPU MLX has one fused operation for the loss of class indices, and one for its gradient, which takes the logits'
memory: `fused`. Everything else, and everything on the CPU, is `block`.
"""

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx

from xent.backends.mlx.block import Block
from xent.backends.mlx.devices import device_type
from xent.backends.mlx.fused import FusedBlock, fuses, needs_memory
from xent.backends.mlx.kernels import Asked, Found, Kernels, RowFacts, joined
from xent.core.chunks import rows_per_block

__all__ = ["KERNELS", "backward", "forward"]


def forward(logits: mx.array, facts: RowFacts, asked: Asked) -> Found:
    """Take a block of rows: see `xent.backends.mlx.kernels.Kernels.forward`."""
    parts, grad = [], None
    for start, z, some in _blocks(logits, facts):
        if parts:
            z = mx.depends(z, parts[-1].arrays() + ([] if grad is None else [grad]))
        found = _block(z, some).forward(asked)
        if found.grad is not None and len(z) < len(logits):
            grad = _placed(grad, found.grad, start, logits)
            found = replace(found, grad=None)
        parts.append(found)
    return parts[0] if len(parts) == 1 else replace(joined(parts), grad=grad)


def backward(logits: mx.array, facts: RowFacts, norm: mx.array) -> mx.array:
    """Return a block's gradient: see `xent.backends.mlx.kernels.Kernels.backward`."""
    grad: mx.array | None = None
    for start, z, some in _blocks(logits, facts):
        if grad is not None:
            z = mx.depends(z, [grad])
        block_grad = _block(z, some).backward(norm[start : start + len(z)])
        grad = block_grad if len(z) == len(logits) else _placed(grad, block_grad, start, logits)
    assert grad is not None
    return grad


KERNELS = Kernels(forward, backward)


def _blocks(logits: mx.array, facts: RowFacts) -> Iterator[tuple[int, mx.array, RowFacts]]:
    """Yield (first row, logits, facts) of parts so small that what is computed on the way takes little memory."""
    count, vocabulary = logits.shape
    step = rows_per_block(vocabulary, facts.weight.dtype.size, device_type(), 1)
    if count <= step or (fuses(logits, facts) and not needs_memory(facts)):
        yield 0, logits, facts
        return
    for start in range(0, count, step):
        part = slice(start, start + step)
        some = replace(
            facts,
            target=None if facts.target is None else facts.target[part],
            probabilities=None if facts.probabilities is None else facts.probabilities[part],
            weight=facts.weight[part],
            scale=facts.scale[part],
            dead=facts.dead[part],
            target_logits=None if facts.target_logits is None else facts.target_logits[part],
        )
        yield start, logits[part], some


def _placed(grad: mx.array | None, block: mx.array, start: int, like: mx.array) -> mx.array:
    """Return the gradient with a block's rows written to it, in its own memory."""
    place = mx.zeros(like.shape, like.dtype) if grad is None else grad
    return mx.slice_update(place, block, mx.array([start]), [0])


def _block(z: mx.array, facts: RowFacts) -> Block:
    return FusedBlock(z, facts) if fuses(z, facts) else Block(z, facts)
