"""Clear errors for gradients, transforms and values that would give wrong numbers, or errors about internals."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from xent.backends.torch import private
from xent.core import validate
from xent.core.call import (
    Allowed,
    ArraySlot,
    Call,
    Classes,
    Dense,
    Given,
    Largest,
    Probabilities,
    Source,
    TopK,
    fields_of,
)

__all__ = [
    "NO_BATCH",
    "NO_FORWARD_MODE",
    "NO_FUNCTIONALIZE",
    "NO_QUANTIZED",
    "NO_SECOND",
    "NO_VMAP",
    "check_rows",
    "check_targets",
    "named",
    "refuse",
]

NO_SECOND = (
    "xent computes no second derivatives: its gradients cannot be differentiated again. Use the plain framework "
    "loss where create_graph=True is needed"
)
NO_FORWARD_MODE = (
    "{} carries a tangent, and xent computes no forward-mode derivatives (torch.func.jvp, jacfwd, hessian, "
    "forward_ad): use reverse mode, or the plain framework loss"
)
NO_VMAP = (
    "{} is batched by torch.vmap, which xent does not support: pass all leading axes in one call, with "
    'reduction="none" if the losses are wanted apart'
)
NO_BATCH = (
    "a batch of upstream gradients (is_grads_batched=True, jacobian(vectorize=True)) does not go through the backward "
    "pass of xent: call torch.autograd.grad once per upstream gradient, or use torch.func.jacrev"
)
NO_FUNCTIONALIZE = (
    "{} is traced by torch.func.functionalize, which would lose the gradient: pass the function to torch.func.grad or "
    "torch.compile without it"
)
_NO_GRADIENT = "{0} requires a gradient, which xent does not compute: pass {0}.detach()"
_NO_TEACHER_GRADIENT = (
    "{0} requires a gradient, which a divergence does not give to its teacher or weights: run the teacher under "
    "torch.no_grad(), or pass {0}.detach()"
)
NO_QUANTIZED = (
    "a QuantizedRows does not go through torch.compile, torch.export, transforms and modes: call the loss outside of "
    "them"
)
_NO_JIT = "torch.jit.trace cannot record xent's functions: use torch.compile or torch.export"
_NO_TRANSFORM_OF_SHARDS = (
    "a vocabulary in shards does not go through torch.func transforms, which cannot follow what crosses ranks: "
    "use backward() or torch.autograd.grad"
)
_ALLOWED = ("logits", "input", "linear_weight", "linear_bias", "teacher.weight", "teacher.bias")
"""What may require a gradient. That of a teacher's classifier, which may be a parameter, is ignored."""


def named(call: Call, kind: Any = Tensor) -> dict[str, Any]:
    """Return the tensors of a call, or what is of another `kind`, by the caller's names of them."""
    source, target, activation, options, _ = call
    assert not isinstance(target, Largest)
    fields = _of_source(source, "logits", "", "linear_")
    if isinstance(target, Dense):
        fields |= _of_source(target.source, "teacher", "teacher.", "teacher.") | {"subset.ids": target.ids}
    elif isinstance(target, TopK):
        fields |= {"teacher.ids": target.ids, "teacher.log_probs": target.log_probs}
    else:
        fields["target"] = target.probs if isinstance(target, Probabilities) else target.ids
    if isinstance(target, Allowed):
        fields |= {"support.ids": target.classes, "support.offsets": target.offsets}
    fields |= fields_of(activation) | fields_of(options)
    return {name: value for name, value in fields.items() if isinstance(value, kind)}


def _of_source(source: Source, logits: str, prefix: str, of_weight: str) -> dict[str, Any]:
    if isinstance(source, Given):
        return {logits: source.logits}
    return {f"{prefix}input": source.input, f"{of_weight}weight": source.weight, f"{of_weight}bias": source.bias}


def refuse(call: Call, traced: bool) -> None:
    """Raise ValueError for a tensor, or outside of tracers its slot, that requires a gradient, and gets none.

    Of a `traced` call, raise NotImplementedError in forward mode and under torch.jit.trace, where the results would be
    treated as constants. `Loss` refuses other transforms; those that Dynamo traces are seen when the call runs.
    """
    tensors = named(call, Tensor if traced else ArraySlot)
    taught = isinstance(call.target, (Dense, TopK))
    allowed: tuple[str, ...] = _ALLOWED
    if call.shards is None and not taught:
        allowed += "target", "logit_scale"
    for name, tensor in tensors.items() if torch.is_grad_enabled() else ():
        if tensor.requires_grad and name not in allowed:
            raise ValueError((_NO_TEACHER_GRADIENT if taught else _NO_GRADIENT).format(name))
    if not traced:
        return
    transformed = private.transforms_active()
    if transformed and call.shards is not None:
        raise NotImplementedError(_NO_TRANSFORM_OF_SHARDS)
    if torch.compiler.is_dynamo_compiling():
        return
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(_NO_JIT)
    for name, tensor in tensors.items():
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(NO_FORWARD_MODE.format(name))


def check_targets(ids: Tensor, ignore_index: int, size: int, shift: int = 0) -> None:
    """Raise IndexError for the first invalid target. Rows do not use the first `shift` ones of the last axis."""
    validate.check_targets(ids.cpu().numpy(), size, ignore_index, shift)


def check_rows(call: Call, size: int, shift: int) -> None:
    """Raise errors for values whose position the steps cannot name, because they see one axis of rows."""
    target, temperature = call.target, call.activation.temperature
    if temperature is not None:
        assert isinstance(target, (Classes, Allowed))
        arrays = temperature.double().cpu().numpy(), target.ids.cpu().numpy()
        validate.check_temperature(*arrays, call.options.ignore_index, shift)
    if isinstance(target, Allowed):
        classes, offsets = (array.to(torch.int64).cpu().numpy() for array in (target.classes, target.offsets))
        validate.check_support(classes, offsets[:-1], offsets[1:], size)
    if isinstance(target, (Classes, Allowed)) and (shift or target.ids.dim() != 1):
        check_targets(target.ids, call.options.ignore_index, size, shift)
