"""The two passes of a prepared call, with the gradients of class probabilities and of a trained scale.

Eager calls and custom operations both run these: `function` for autograd, `operations` for compilers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import loop, private
from xent.backends.torch.contract import Setting, Upstream
from xent.backends.torch.memory import Rows
from xent.backends.torch.probability_gradient import probability_gradient
from xent.backends.torch.scale_gradient import scale_gradient, with_scale
from xent.core.call import Call, Given, Probabilities
from xent.core.chunks import rows_per_block

__all__ = [
    "PLAIN_TYPES",
    "SCALES",
    "Asked",
    "asked_of",
    "backward",
    "forward",
    "is_plain",
    "leaves_of",
    "makes_first",
    "scale",
    "undisturbed",
]

PLAIN_TYPES = (Tensor, torch.nn.Parameter)

Asked = tuple[bool, ...]
"""Which gradients are asked for: those of the leaves (logits; or input, weight, bias), of class probabilities, and of
the logit scale."""


def leaves_of(call: Call) -> tuple[Any, ...]:
    """Return the values to which `Asked` refers."""
    source = call.source
    leaves = (source.logits,) if isinstance(source, Given) else (source.input, source.weight, source.bias)
    values = call.target.values if isinstance(call.target, Probabilities) else None
    return (*leaves, values, call.activation.logit_scale)


def asked_of(leaves: tuple[Any, ...]) -> Asked:
    """Return which gradients are asked for."""
    enabled = torch.is_grad_enabled()
    return tuple([enabled and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves])


def is_plain(tensors: Any) -> bool:
    """Return whether the tensors have memory and nothing is traced, so that no custom operation is needed.

    Batched tensors and those of ended transforms are of type Tensor, but have no memory.
    """
    if torch.compiler.is_dynamo_compiling() or private.dispatch_modes() or private.transforms_active():
        return False
    try:
        for tensor in tensors:
            if type(tensor) not in PLAIN_TYPES or tensor.is_meta or tensor.is_neg():
                return False
            tensor.data_ptr()
    except RuntimeError:
        return False
    return private.forward_level() < 0 and not torch.jit.is_tracing()  # type: ignore[attr-defined]


def forward(call: Call, asked: Asked, kernel: str, reuse: bool, skips: bool) -> tuple[loop.Outcome, Tensor | None]:
    """Compute a prepared call. Return what the loop returns, and the gradient of the scale if it is made already."""
    needs = with_scale(call, asked) if asked[-1] else asked[:-2]
    outcome = loop.forward(call, needs, kernel, reuse, skips)
    if not asked[-1] or not makes_first(call, asked):
        return outcome, None
    of_scale = scale_gradient(call, outcome.gradients)
    kept = [made if wanted else None for made, wanted in zip(outcome.gradients, asked, strict=False)]
    return outcome._replace(gradients=kept), of_scale


def backward(
    call: Call, asked: Asked, kernel: str, saved: Tensor | None, upstream: Upstream, reuse: bool, skips: bool
) -> list[Tensor | None]:
    """Return the gradients that are asked for, and None for the others."""
    needs = with_scale(call, asked) if asked[-1] else asked[:-2]
    made: list[Tensor | None] = [None] * len(needs)
    of_scale = of_target = None
    if any(needs):
        made = loop.backward(call, needs, kernel, saved, upstream, reuse, skips)
    if asked[-1]:
        of_scale = scale_gradient(call, made)
        made = [one if wanted else None for one, wanted in zip(made, asked, strict=False)]
    if asked[-2]:
        of_target = probability_gradient(call, upstream)
    return [*made, of_target, of_scale]


def makes_first(call: Call, asked: Asked) -> bool:
    """Return whether the forward pass makes the gradients of leaves and scale."""
    needs = (*asked[:-2], asked[-1])
    source = call.source
    compute = source.logits.dtype if isinstance(source, Given) else None
    first: bool = Setting(call, 0, 0, 0, 0, compute or torch.float32, needs).made_first
    return first


def undisturbed(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` without autocast, and with that device as the current one, on which Triton launches."""
    kind = device.type
    if kind == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return undisturbed(device, function, *args)
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return function(*args)
    return function(*args)


def scale(grads: list[Tensor], upstream: Tensor, deferred: Tensor | None, inplace: bool) -> list[Tensor]:
    """Return gradients times 0-d factors of the dtype of sums, rounded once; with `inplace` overwrite them."""
    factor = upstream if deferred is None else upstream * deferred
    if factor.is_cpu and inplace and float(factor) == 1:
        return grads
    return [_product(grad, factor, inplace) for grad in grads]


def _product(grad: Tensor, factor: Tensor, inplace: bool) -> Tensor:
    if factor.is_cpu or grad.dtype == factor.dtype or not grad.numel():
        return grad.mul_(factor) if inplace else grad * factor
    # On an accelerator PyTorch rounds a 0-d factor to the gradient's dtype first, but not a 1-d factor.
    out = grad if inplace else torch.empty_like(grad)
    places, step = Rows(out), rows_per_block(grad.shape[-1], factor.itemsize, factor.device.type, 1)
    for start, block in Rows(grad).blocks(step):
        places.put(start, (block * factor.reshape(1)).to(grad.dtype))
    return out


Scale = Callable[[list[Tensor], Tensor, Tensor | None, bool], list[Tensor]]

SCALES: dict[str, Scale] = {}
"""Backend -> its function instead of `scale`."""
