"""`cross_entropy` in PyTorch: one pass over logits that exist, whatever their strides.

Gradients of a mean or sum are made with the loss. In float16 they would leave its range before a loss scale is known,
so there, as with "none", backward makes them, from the logits and each row's norm.
"""

import torch
from torch import Tensor

from xent.backends.torch.job import Upstream, start
from xent.backends.torch.options import Options
from xent.backends.torch.rows import gradient_like

__all__ = ["backward", "forward", "makes_gradient_first", "new_norm"]


def makes_gradient_first(reduction: str, dtype: torch.dtype) -> bool:
    """Whether the forward pass makes the gradient, rather than the backward pass."""
    return reduction != "none" and dtype != torch.float16


def new_norm(logits: Tensor) -> Tensor:
    """Return memory for the norm of all rows, (3, N)."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.empty((3, logits.shape[:-1].numel()), dtype=dtype, device=logits.device)


def forward(logits: Tensor, grad: Tensor | None, norm: Tensor | None, options: Options) -> tuple[Tensor, list[Tensor]]:
    """Return loss and statistics; write the gradient of the reduced loss, and what backward needs, where asked."""
    job = start(options, logits.shape[-1], logits.dtype)
    job.logits(logits, grad, norm)
    return job.finish()


def backward(
    upstream: Upstream, logits: Tensor, norm: Tensor, entropy: Tensor | None, options: Options, inplace: bool = False
) -> Tensor:
    """Return the gradient for `upstream`; `norm` and `entropy` as the forward pass left them."""
    grad = logits if inplace else gradient_like(logits)
    quiet = options._replace(spec=options.spec.without_stats())
    start(quiet, logits.shape[-1], logits.dtype, upstream=upstream).gradient(logits, grad, norm, entropy)
    return grad
