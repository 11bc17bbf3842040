"""The functions and attributes, such as the shape, that deferred logits answer without computing values."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["METADATA", "getter"]


def getter(attribute: str) -> Any:
    """Return the function that `__torch_function__` receives when an attribute is read."""
    return getattr(Tensor, attribute).__get__


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
        *[getter(name) for name in _ATTRIBUTES],
        *[getattr(Tensor, name) for name in _METHODS],
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
    ]
)
"""Functions that are called on the deferred tensor itself."""
