"""The calls that deferred logits record; others compute real logits. Importing this module registers them."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.integrations.transformers import loss, steps
from xent.integrations.transformers.attributes import getter
from xent.integrations.transformers.deferred import KEYWORDS, KNOWN

__all__: list[str] = []


def _cross_entropy(function: Any, *args: Any, **kwargs: Any) -> Any:
    return loss.cross_entropy(*args, **kwargs)


_RECORDERS = {
    F.cross_entropy: _cross_entropy,
    F.tanh: steps.tanh,
    torch.tanh: steps.tanh,
    Tensor.tanh: steps.tanh,
    torch.add: steps.add,
    Tensor.add: steps.add,
    Tensor.__add__: steps.add,
    Tensor.__radd__: steps.add,
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
    Tensor.detach: steps.detach,
    Tensor.view: steps.reshape,
    Tensor.reshape: steps.reshape,
    torch.reshape: steps.reshape,
    Tensor.flatten: steps.flatten,
    torch.flatten: steps.flatten,
    Tensor.__getitem__: steps.take,
    Tensor.register_hook: steps.register_hook,
    getter("_base"): steps.base_of,
}
_NAMES = {
    F.cross_entropy: frozenset(inspect.signature(loss.cross_entropy).parameters),
    Tensor.to: frozenset(["dtype", "device", "non_blocking"]),
    Tensor.flatten: frozenset(["start_dim", "end_dim"]),
    torch.flatten: frozenset(["start_dim", "end_dim"]),
}

KNOWN.update(_RECORDERS)
KEYWORDS.update(_NAMES)
