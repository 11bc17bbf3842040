"""`cross_entropy` in PyTorch: one pass over logits that exist, block by block, whatever their strides."""

from collections.abc import Iterator

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts
from xent.backends.torch.kernels import kernels
from xent.backends.torch.options import Options
from xent.backends.torch.results import Results, new_results
from xent.backends.torch.rows import Rows
from xent.core.chunks import rows_per_block

__all__ = ["backward", "forward"]


def forward(logits: Tensor, grad: Tensor | None, options: Options, keep_norm: bool) -> tuple[Facts, Results]:
    """Pass over (..., V) logits; write the gradient of the reduced loss into `grad`, which may be `logits` itself."""
    chosen = kernels(options.kernel)
    facts = chosen.gather_facts(options, logits.shape[-1], logits.dtype)
    results = new_results(facts, keep_norm)
    run = chosen.row_pass(facts, results)
    for start, block, out in _blocks(logits, grad):
        run.forward(block, start, out)
    return facts, results


def backward(upstream: Tensor, logits: Tensor, grad: Tensor, norm: Tensor, options: Options) -> None:
    """Write into `grad` the gradient for `upstream`, that of the rows' losses; `grad` may be `logits` itself."""
    chosen = kernels(options.kernel)
    facts = chosen.gather_facts(options, logits.shape[-1], logits.dtype, upstream=upstream)
    run = chosen.row_pass(facts, Results(loss=facts.weight, norm=norm))
    for start, block, out in _blocks(logits, grad):
        run.backward(block, start, out)


def _blocks(logits: Tensor, grad: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield (first row, block of logits, place of its gradient) with contiguous class axes.

    A block whose classes do not lie side by side is copied for the kernel, and its gradient copied back afterwards.
    """
    vocabulary = logits.shape[-1]
    contiguous = vocabulary == 1 or logits.stride(-1) == 1
    most = logits.shape[:-1].numel()
    if not contiguous:
        most = rows_per_block(vocabulary, logits.itemsize, logits.device.type, torch.get_num_threads())
    grads = None if grad is None else Rows(grad)
    for start, block in Rows(logits).blocks(most):
        place = None if grads is None else grads.block(start, start + block.shape[0])
        if not contiguous:
            block = block.contiguous()
        if place is None or vocabulary == 1 or place.stride(-1) == 1:
            yield start, block, place
        else:
            yield start, block, block
            place.copy_(block)
