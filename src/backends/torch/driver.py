"""From a call to autograd and back: autocast, which gradients are asked for, results in the caller's shapes."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from xent.backends.torch import ops as _ops  # noqa: F401  registers the operations
from xent.backends.torch.autograd import CrossEntropy, CrossEntropyInplace, LinearCrossEntropy
from xent.backends.torch.options import Options, pack_numbers
from xent.backends.torch.rows import overlaps
from xent.core.spec import LinearCall, LogitsCall, LossSpec, Stats

__all__ = ["run"]

_PER_ROW = ("lse", "nll", "entropy", "predictions")


def run(call: LogitsCall | LinearCall, kernel: str) -> tuple[Tensor, Stats]:
    """Run a call with the row kernel of that name."""
    without_gradient = _tensors(call, "target", "weight", "sample_weight", "normalizer")
    _refuse_gradients(without_gradient)
    _refuse_transforms(without_gradient)
    names = ("logits",) if isinstance(call, LogitsCall) else ("input", "linear_weight", "linear_bias")
    _refuse_transforms(_tensors(call, *names))
    return _run_logits(call, kernel) if isinstance(call, LogitsCall) else _run_linear(call, kernel)


def _run_logits(call: LogitsCall, kernel: str) -> tuple[Tensor, Stats]:
    logits, target = _classes_last(call.logits, call.axis), call.target
    if target.is_floating_point():
        target = _classes_last(target, call.axis)
    options = _options(call, target, kernel)
    needs_grad = torch.is_grad_enabled() and logits.requires_grad
    if not needs_grad:
        loss, _, _, stats = torch.ops.xent.cross_entropy(logits, False, *options)
    elif call.inplace and not torch.compiler.is_compiling():
        _check_inplace(call.logits)
        loss, *stats = CrossEntropyInplace.apply(logits, *options)
    else:
        # A compiler plans memory by itself, and cannot see that an operation before this one saved the logits.
        loss, _, _, *stats = CrossEntropy.apply(logits, True, *options)
    return _shaped(loss, stats, call.loss, logits.shape[:-1])


def _classes_last(tensor: Tensor, axis: int) -> Tensor:
    return tensor if axis == tensor.dim() - 1 else tensor.movedim(axis, -1)


def _run_linear(call: LinearCall, kernel: str) -> tuple[Tensor, Stats]:
    source, weight, bias = call.input, call.linear_weight, call.linear_bias
    compute = _compute_dtype(source, weight, bias)
    asks = torch.is_grad_enabled()
    needs = [asks and tensor is not None and tensor.requires_grad for tensor in (source, weight, bias)]
    options = _options(call, call.target, kernel)
    arguments = (source, weight, bias, needs, call.shift, call.workspace, compute, *options)
    if any(needs):
        loss, _, _, _, _, _, *stats = LinearCrossEntropy.apply(*arguments)
    else:
        loss, _, _, _, stats = torch.ops.xent.linear_cross_entropy(*arguments)
    return _shaped(loss, stats, call.loss, source.shape[:-1])


def _options(call: LogitsCall | LinearCall, target: Tensor, kernel: str) -> Options:
    spec, normalizer = call.loss, call.normalizer
    is_tensor = isinstance(normalizer, Tensor)
    return Options(
        target,
        call.weight,
        call.sample_weight,
        normalizer if is_tensor else None,
        pack_numbers(spec, None if is_tensor else normalizer),
        spec.ignore_index,
        spec.softcap is not None,
        normalizer is not None and not is_tensor,
        spec.reduction,
        list(spec.stats),
        kernel,
    )


def _shaped(loss: Tensor, stats: list[Tensor], spec: LossSpec, rows: torch.Size) -> tuple[Tensor, Stats]:
    """Give per-row results, which come flat, the shape of the rows."""
    each_row = spec.reduction == "none"
    named: dict[str, Any] = {}
    for name, value in zip(spec.stats, stats, strict=True):
        named[name] = value.view(rows) if name in _PER_ROW or (name == "z_loss" and each_row) else value
    return loss.view(rows) if each_row else loss, Stats(**named)


def _compute_dtype(source: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's as for F.linear, else the one that all share."""
    device = source.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    if autocast and torch.float64 not in (source.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    if weight.dtype != source.dtype:
        raise TypeError(
            f"linear_weight must have the dtype of input, {source.dtype}, outside of torch.autocast; got {weight.dtype}"
        )
    if bias is not None and bias.dtype != source.dtype:
        raise TypeError(
            f"linear_bias must have the dtype of input, {source.dtype}, outside of torch.autocast; got {bias.dtype}"
        )
    return source.dtype


def _tensors(call: LogitsCall | LinearCall, *names: str) -> dict[str, Tensor]:
    """Return those arguments that are tensors: a `normalizer` may be a number, and others None."""
    found = {name: getattr(call, name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _refuse_gradients(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, which xent does not compute: pass {name}.detach()")


def _refuse_transforms(tensors: dict[str, Tensor]) -> None:
    """Raise for forward mode, in which the operations would pass for constants, and for torch.vmap."""
    transformed = torch._C._are_functorch_transforms_active()
    for name, tensor in tensors.items():
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name} carries a tangent, and xent computes no forward-mode derivatives (torch.func.jvp, jacfwd, "
                "hessian, forward_ad): use reverse mode, or the plain framework loss"
            )
        if transformed and torch._C._functorch.is_batchedtensor(tensor):  # pyright: ignore[reportAttributeAccessIssue]
            raise NotImplementedError(
                f"{name} is batched by torch.vmap, which xent does not support: pass all leading axes in one call, "
                'with reduction="none" if the losses are wanted apart'
            )


def _check_inplace(logits: Tensor) -> None:
    if overlaps(logits):
        raise ValueError(
            f"inplace=True needs logits whose elements do not share memory, got shape {tuple(logits.shape)} with "
            f"strides {logits.stride()}"
        )
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError("inplace=True cannot be used under torch.func transforms")
