"""Calls that deferred logits answer or record; with all others real logits are computed."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.integrations.transformers import loss, steps

__all__ = ["KEYWORDS", "KNOWN", "METADATA"]


def _cross_entropy(function: Any, *args: Any, **kwargs: Any) -> Any:
    return loss.cross_entropy(*args, **kwargs)


def _getter(attribute: str) -> Any:
    """Return what `__torch_function__` is given for an attribute."""
    return getattr(Tensor, attribute).__get__


KNOWN: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.tanh: steps.tanh,
    torch.tanh: steps.tanh,
    Tensor.tanh: steps.tanh,
    torch.add: steps.add,
    Tensor.add: steps.add,
    Tensor.__add__: steps.add,
    torch.mul: steps.multiply,
    torch.multiply: steps.multiply,
    Tensor.mul: steps.multiply,
    Tensor.multiply: steps.multiply,
    Tensor.__mul__: steps.multiply,
    Tensor.__rmul__: steps.multiply,
    torch.div: steps.divide,
    torch.true_divide: steps.divide,
    Tensor.div: steps.divide,
    Tensor.__truediv__: steps.divide,
    Tensor.float: steps.to_float,
    Tensor.to: steps.to,
    Tensor.contiguous: steps.make_contiguous,
    torch.clone: steps.clone,
    Tensor.clone: steps.clone,
    Tensor.view: steps.reshape,
    Tensor.reshape: steps.reshape,
    torch.reshape: steps.reshape,
    Tensor.flatten: steps.flatten,
    torch.flatten: steps.flatten,
    Tensor.__getitem__: steps.take,
    Tensor.register_hook: steps.register_hook,
    _getter("_base"): steps.base_of,
}
"""What is recorded: the function, and who records it."""

KEYWORDS: dict[Any, frozenset[str]] = {
    F.cross_entropy: frozenset(inspect.signature(loss.cross_entropy).parameters),
    Tensor.to: frozenset(["dtype", "device", "non_blocking"]),
    Tensor.flatten: frozenset(["start_dim", "end_dim"]),
    torch.flatten: frozenset(["start_dim", "end_dim"]),
}
"""What these functions may be given by keyword and still be recorded; the others, nothing."""

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"),
    *("is_cuda", "is_meta", "is_quantized", "is_sparse"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "__len__", "__hash__"),
    *("is_floating_point", "is_complex"),
)
METADATA: frozenset[Any] = frozenset(
    [
        *[_getter(name) for name in _ATTRIBUTES],
        *[getattr(Tensor, name) for name in _METHODS],
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
    ]
)
"""What is answered from the tensor itself."""
