"""The scale of gradients that were computed in the forward pass, by the upstream gradient of the backward pass."""

import torch
from torch import Tensor

from xent.backends.torch.memory import is_dense
from xent.backends.triton.geometry import rows_of
from xent.backends.triton.kernels.linear_kernels import scale_kernel
from xent.backends.triton.machine import multiprocessors
from xent.backends.triton.prepared import cdiv, launch, next_power_of_2

__all__ = ["scale"]

_SCALED = 4096  # elements of a block


def scale(grads: list[Tensor], upstream: Tensor, deferred: Tensor | None, inplace: bool) -> list[Tensor]:
    """Return gradients times 0-d factors, rounded once; in their own memory with `inplace`."""
    if inplace and len(grads) > 1 and is_dense(grads[0]) and is_dense(grads[1]):
        first, other, *rest = grads
        _launch(first, first, other, upstream, deferred)
        return [first, other, *scale(rest, upstream, deferred, True)]
    made = []
    for grad in grads:
        out = grad if inplace else torch.empty_like(grad)
        if is_dense(grad) or (inplace and grad.stride(-1) == 1 and rows_of(grad) is not None):
            _launch(grad, out, None, upstream, deferred)
        else:  # a 1-d factor, because PyTorch rounds a 0-d factor to the gradient's dtype first
            out.copy_(grad * (upstream if deferred is None else upstream * deferred).reshape(1))
        made.append(out)
    return made


def _launch(grad: Tensor, out: Tensor, other: Tensor | None, upstream: Tensor, deferred: Tensor | None) -> None:
    """Scale a gradient into `out`, and in place another one without gaps."""
    place: tuple[int, int, int] | None = (1, 0, 0)
    rows, length, size = 1, grad.numel(), _SCALED
    if not is_dense(grad):
        place = rows_of(grad)
        rows, length = grad.shape[:-1].numel(), grad.shape[-1]
        size = min(next_power_of_2(length), _SCALED)
    assert place is not None
    count = 0 if other is None else other.numel()
    blocks = max(rows * cdiv(length, size), cdiv(count, size))
    if blocks:
        launch(
            scale_kernel,
            min(blocks, 4 * multiprocessors(grad.device)),
            (grad, *place, out, other, upstream, deferred, rows, length, count),
            {"GROUPED": place[0] < rows, "INPLACE": out is grad, "BLOCK": size},
            num_warps=8,
        )
