"""The custom operations of divergences, which torch.compile, autocast, fake and meta tensors see.

They are like those of `ops`. The same two operations are for logits and for hidden states with a classifier.
"""

import math
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.divergence import loop
from xent.backends.torch.divergence.call import SCHEMA, Divergence, reduction_of, unpack
from xent.backends.torch.ops import fake_gradients, operation

__all__: list[str] = []


def _fake_call(args: Any) -> Divergence:
    """Return the call without its numbers."""
    normalizer, _, needs, _, *rest = args[7:]
    numbers = (0.0, None, 1.0, None, 1.0, 1.0)
    values: tuple[Any, ...] = (*args[:7], normalizer, *numbers, tuple(needs), *rest)
    return Divergence(*values)


def _fake_gradients(call: Divergence, wanted: bool) -> list[Tensor]:
    if call.weight is not None:
        return fake_gradients(loop.linear_of(call), wanted)
    made = loop.empty_gradients(call)
    if wanted and call.needs[0]:
        made[0] = call.student.new_empty(call.student.shape)
    return made


def _fake_forward(*args: Any) -> Any:
    call, each_row = _fake_call(args), reduction_of(args) == "none"
    acc, device = call.accumulation, call.student.device
    # Sizes may be symbolic; `math.prod` keeps them symbolic.
    count = math.prod(call.rows)
    loss = torch.empty((count,) if each_row else (), dtype=acc, device=device)
    gradients = _fake_gradients(call, call.makes_gradient_first)
    entropy = torch.empty((count if call.entropy else 0,), dtype=acc, device=device)
    return loss, torch.empty((), dtype=acc, device=device), gradients, entropy


@operation(f"divergence({SCHEMA}) -> (Tensor loss, Tensor deferred, Tensor[] gradients, Tensor entropy)", _fake_forward)
def _forward(*args: Any) -> Any:
    loss, deferred, gradients, entropy = loop.forward(unpack(args))
    none = loss.new_empty(0) if entropy is None else entropy
    return loss, loss.new_ones(()) if deferred is None else deferred, gradients, none


@operation(
    f"divergence_backward(Tensor upstream, {SCHEMA}) -> Tensor[]",
    lambda upstream, *args: _fake_gradients(_fake_call(args), True),
)
def _backward(upstream: Tensor, *args: Any) -> list[Tensor]:
    return loop.backward(upstream, unpack(args))
