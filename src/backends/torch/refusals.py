"""Clear errors for gradients, transforms and values that would give wrong numbers, or errors about internals."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from xent.backends.torch import private
from xent.backends.torch.memory import cast
from xent.core.call import Allowed, Call, Classes, Dense, Given, Probabilities, Product, TopK, fields_of

__all__ = ["NO_SECOND", "check_rows", "named", "refuse_gradients", "refuse_transforms"]

NO_SECOND = (
    "xent computes no second derivatives: its gradients cannot be differentiated again. Use the plain framework "
    "loss where create_graph=True is needed"
)
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
_NO_TEACHER_GRADIENT = (
    "{0} requires a gradient, which a divergence does not give to its teacher or weights: run the teacher under "
    "torch.no_grad(), or pass {0}.detach()"
)
_NO_JIT = "torch.jit.trace cannot record xent's functions: use torch.compile or torch.export"
_NO_TRANSFORM_OF_SHARDS = (
    "a vocabulary in shards does not go through torch.func transforms, which cannot follow what crosses ranks: "
    "use backward() or torch.autograd.grad"
)


def named(call: Call) -> dict[str, Tensor]:
    """Return the tensors of a call by the caller's names of them."""
    source, target, activation, options, _ = call
    found = {"logits": source.logits} if isinstance(source, Given) else _of_product(source, "", "linear_")
    if isinstance(target, Dense):
        teacher = target.source
        found |= {"teacher": teacher.logits} if isinstance(teacher, Given) else _of_product(teacher, *["teacher."] * 2)
        found["teacher.ids"] = target.ids
    elif isinstance(target, TopK):
        found |= {"teacher.ids": target.ids, "teacher.log_probs": target.log_probs}
    elif isinstance(target, Probabilities):
        found["target"] = target.values
    else:
        found["target"] = target.ids
        if isinstance(target, Allowed):
            found |= {"support.ids": target.classes, "support.offsets": target.begin}
    found |= fields_of(activation)
    for name in ("weight", "sample_weight", "normalizer", "label_smoothing", "z_loss"):
        found[name] = getattr(options, name)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _of_product(source: Product, prefix: str, of_weight: str) -> dict[str, Tensor | None]:
    return {f"{prefix}input": source.input, f"{of_weight}weight": source.weight, f"{of_weight}bias": source.bias}


_ALLOWED = ("logits", "input", "linear_weight", "linear_bias", "teacher.weight", "teacher.bias")
"""What may require a gradient. That of a teacher's classifier, which may be a parameter, is ignored."""


def refuse_gradients(call: Call, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError for a tensor that requires a gradient, and gets none."""
    if not torch.is_grad_enabled():
        return
    taught = isinstance(call.target, (Dense, TopK))
    allowed: tuple[str, ...] = _ALLOWED
    if call.shards is None and not taught:
        allowed += "target", "logit_scale"
    for name, tensor in tensors.items():
        if tensor.requires_grad and name not in allowed:
            raise ValueError((_NO_TEACHER_GRADIENT if taught else _NO_GRADIENT).format(name))


def refuse_transforms(call: Call, tensors: dict[str, Tensor]) -> None:
    """Raise NotImplementedError for forward mode, torch.vmap, torch.func.functionalize and torch.jit.trace.

    In forward mode, and inside of functionalize, the results of xent's operations would be treated as constants. Calls
    that Dynamo traces under a transform are checked when they run.
    """
    traced, transformed = torch.compiler.is_dynamo_compiling(), private.transforms_active()
    if transformed and call.shards is not None:
        raise NotImplementedError(_NO_TRANSFORM_OF_SHARDS)
    if traced and transformed:
        return
    if not traced and torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(_NO_JIT)
    for name, tensor in tensors.items():
        kinds = private.transforms_of(tensor) if transformed else ()
        if "Jvp" in kinds or forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(_NO_FORWARD_MODE.format(name))
        if "Vmap" in kinds:
            raise NotImplementedError(_NO_VMAP.format(name))
        if "Functionalize" in kinds:
            raise NotImplementedError(_NO_FUNCTIONALIZE.format(name))


def check_rows(call: Call, size: int, shift: int) -> None:
    """Raise errors for values whose position the steps cannot name, because they see one axis of rows."""
    target, temperature = call.target, call.activation.temperature
    if temperature is not None:
        _check_temperature(temperature, shift)
    if isinstance(target, Allowed):
        _check_support(target, size)
    if isinstance(target, (Classes, Allowed)) and (shift or target.ids.dim() != 1):
        _check_targets(target.ids, call.options.ignore_index, size, shift)


def _check_targets(ids: Tensor, ignore_index: int, size: int, shift: int) -> None:
    used = ids[..., shift:] if shift else ids
    if not used.numel():
        return
    low, high = torch.aminmax(cast(used, torch.int64))
    if int(low) >= 0 and int(high) < size:
        return
    wrong = ((used < 0) | (used >= size)) & (used != ignore_index)
    if bool(wrong.any()):
        position = wrong.nonzero()[0].tolist()
        found = int(used[tuple(position)])
        if shift:
            position[-1] += shift
        raise IndexError(
            f"target{position or ''} is {found}; classes are 0 to {size - 1}, or ignore_index={ignore_index}"
        )


def _check_temperature(temperature: Tensor, shift: int) -> None:
    wrong = ~(temperature > 0)
    if shift:
        wrong[..., :shift] = False
    if bool(wrong.any()):
        position = wrong.nonzero()[0].tolist()
        where = f" at {position}" if position else ""
        raise ValueError(f"temperature must be > 0 in every row, got {float(temperature[tuple(position)])}{where}")


def _check_support(target: Allowed, size: int) -> None:
    begin, end, classes = (values.to(torch.int64) for values in (target.begin, target.end, target.classes))
    if not len(begin):
        return
    sizes = end - begin
    falls = bool((sizes < 0).any())
    if int(begin[0]) != 0 or falls or int(end[-1]) != len(classes):
        raise ValueError(
            f"support.offsets must be non-decreasing from 0 to {len(classes)}, the number of ids; got {int(begin[0])} "
            f"to {int(end[-1])}" + (" and a decrease between" if falls else "")
        )
    wrong = (classes < 0) | (classes >= size)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise IndexError(f"support.ids[{place}] is {int(classes[place])}; classes are 0 to {size - 1}")
    keys = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes) * size + classes
    if bool((keys.diff() <= 0).any()):
        keys = keys.sort().values
        again = keys[1:][keys.diff() == 0]
        if len(again):
            row, repeated = divmod(int(again[0]), size)
            raise ValueError(
                f"support.ids must hold a class at most once in a row; row {row} has {repeated} more than once"
            )
