"""Clear errors for transforms of PyTorch that would give wrong numbers, or errors about internals."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from xent.backends.torch import private

__all__ = ["NO_TEACHER_GRADIENT", "refuse_gradients", "refuse_transforms"]

_NO_FORWARD_MODE = (
    "{} carries a tangent, and xent computes no forward-mode derivatives (torch.func.jvp, jacfwd, hessian, "
    "forward_ad): use reverse mode, or the plain framework loss"
)
_NO_VMAP = (
    "{} is batched by torch.vmap, which xent does not support: pass all leading axes in one call, with "
    'reduction="none" if the losses are wanted apart'
)
_NO_FUNCTIONALIZE = (
    "{} is traced by torch.func.functionalize, which would lose the gradient: pass the function to torch.func.grad or "
    "torch.compile without it"
)
_NO_GRADIENT = "{0} requires a gradient, which xent does not compute: pass {0}.detach()"
NO_TEACHER_GRADIENT = (
    "{0} requires a gradient, which a divergence does not give to its teacher or weights: run the teacher under "
    "torch.no_grad(), or pass {0}.detach()"
)
_NO_JIT = "torch.jit.trace cannot record xent's functions: use torch.compile or torch.export"


def refuse_gradients(tensors: dict[str, Tensor], message: str = _NO_GRADIENT) -> None:
    """Raise ValueError for a tensor that requires a gradient."""
    for name, tensor in tensors.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(message.format(name))


def refuse_transforms(tensors: dict[str, Tensor]) -> None:
    """Raise NotImplementedError for forward mode, torch.vmap, torch.func.functionalize and torch.jit.trace.

    In forward mode, and inside of functionalize, the results of xent's operations would be treated as constants. Calls
    that Dynamo traces under a transform are checked when they run (`compiled`).
    """
    traced, transformed = torch.compiler.is_dynamo_compiling(), private.transforms_active()
    if traced and transformed:
        return
    if not traced and private.jit_traces():
        raise NotImplementedError(_NO_JIT)
    for name, tensor in tensors.items():
        kinds = private.transforms_of(tensor) if transformed else ()
        if "Jvp" in kinds or forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(_NO_FORWARD_MODE.format(name))
        if "Vmap" in kinds:
            raise NotImplementedError(_NO_VMAP.format(name))
        if "Functionalize" in kinds:
            raise NotImplementedError(_NO_FUNCTIONALIZE.format(name))
