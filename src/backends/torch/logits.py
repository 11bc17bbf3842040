"""`cross_entropy` in PyTorch: one pass over logits with any strides.

For "mean" and "sum" the forward pass computes the gradient. With "none", and for float16, where the gradient could
underflow before the loss scale is known, the backward pass computes it from the logits and the saved log-sum-exp.
"""

import torch
from torch import Tensor

from xent.backends.torch.facts import accumulation_dtype
from xent.backends.torch.job import Upstream, start
from xent.backends.torch.options import Options
from xent.backends.torch.rows import gradient_like

__all__ = ["backward", "forward", "makes_gradient_first", "new_norm"]


def makes_gradient_first(reduction: str, dtype: torch.dtype) -> bool:
    """Whether the forward pass computes the gradient, instead of the backward pass."""
    return reduction != "none" and dtype != torch.float16


def new_norm(logits: Tensor) -> Tensor:
    """Allocate `norm`, (3, N): the parts of the log-sum-exp of all rows."""
    count, dtype = logits.shape[:-1].numel(), accumulation_dtype(logits.dtype)
    return torch.empty((3, count), dtype=dtype, device=logits.device)


def forward(logits: Tensor, grad: Tensor | None, norm: Tensor | None, options: Options) -> tuple[Tensor, list[Tensor]]:
    """Return loss and statistics. Write the gradient of the reduced loss to `grad` and the log-sum-exp to `norm`."""
    job = start(options, logits.shape[-1], logits.dtype)
    job.logits(logits, grad, norm)
    return job.finish()


def backward(
    upstream: Upstream, logits: Tensor, norm: Tensor, entropy: Tensor | None, options: Options, inplace: bool = False
) -> Tensor:
    """Return the gradient for `upstream`, with `norm` and `entropy` from the forward pass."""
    grad = logits if inplace else gradient_like(logits)
    quiet = options._replace(spec=options.spec.without_stats())
    start(quiet, logits.shape[-1], logits.dtype, upstream=upstream).gradient(logits, grad, norm, entropy)
    return grad
