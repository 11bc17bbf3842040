"""Autograd around the custom operations: what is saved, what backward returns, what raises.

Gradients of a mean or sum are made with the loss and kept; backward only multiplies the upstream scalar in, into the
kept memory itself when the graph is not retained, so that nothing of the gradient's size is allocated. A kept gradient
is an output of its Function: whoever differentiates a gradient again arrives at that output, and at an error, instead
of at a wrong number.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.options import Options

__all__ = ["CrossEntropy", "CrossEntropyInplace", "LinearCrossEntropy"]

_NO_SECOND = (
    "xent computes no second derivatives: its gradients cannot be differentiated again. Use the plain framework loss "
    "where create_graph=True is needed"
)
_TENSORS = Options._fields.index("ignore_index")  # the fields before it are tensors
_REDUCTION = Options._fields.index("reduction")
_KERNEL = Options._fields.index("kernel")


def _signed(function: Any) -> Any:
    """Let `function` carry its signature, which torch.autograd.Function otherwise works out at every call."""
    function.__signature__ = inspect.signature(function)
    return function


class CrossEntropy(torch.autograd.Function):
    """(logits, needs_grad, *options) -> (loss, kept, deferred, *stats)."""

    @staticmethod
    @_signed
    def forward(logits: Tensor, needs_grad: bool, *options: Any) -> Any:
        loss, kept, deferred, stats = torch.ops.xent.cross_entropy(logits, needs_grad, *options)
        return loss, kept, deferred, *stats

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, _, *options = inputs
        _, kept, deferred, *stats = output
        _keep_options(ctx, options)
        if ctx.reduction == "none":
            ctx.save_for_backward(logits, kept, *options[:_TENSORS])
            ctx.mark_non_differentiable(kept, deferred, *stats)
        else:
            ctx.save_for_backward(kept, deferred)
            ctx.mark_non_differentiable(deferred, *stats)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, kept_upstream: Tensor | None, *_: Any) -> Any:
        rest = (None,) * (1 + len(Options._fields))
        _refuse_second(kept_upstream)
        if upstream is None:
            return None, *rest
        if ctx.reduction == "none":
            logits, norm, *tensors = ctx.saved_tensors
            operation = torch.ops.xent.cross_entropy_backward
            return _first_order(operation, upstream, logits, norm, *tensors, *ctx.constants), *rest
        kept, deferred = ctx.saved_tensors
        return _scaled(ctx, kept, upstream, deferred), *rest


class CrossEntropyInplace(torch.autograd.Function):
    """(logits, *options) -> (loss, *stats), the logits' memory ending up as their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *options: Any) -> Any:
        _keep_options(ctx, options)
        # Saved as they came, so that a gradient of the gradient finds its way back to them, and to an error.
        if ctx.reduction == "none":
            loss, norm, _, stats = torch.ops.xent.cross_entropy(logits, True, *options)
            ctx.save_for_backward(logits, norm, *options[:_TENSORS])
        else:
            loss, deferred, stats = torch.ops.xent.cross_entropy_(logits.detach(), *options)
            ctx.save_for_backward(logits, deferred)
        ctx.mark_non_differentiable(*stats)
        ctx.set_materialize_grads(False)
        return loss, *stats

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> Any:
        rest = (None,) * len(Options._fields)
        if upstream is None:
            return None, *rest
        if ctx.reduction != "none":
            kept, deferred = ctx.saved_tensors
            return _first_order(_scaled, ctx, kept, upstream, deferred), *rest
        logits, norm, *tensors = ctx.saved_tensors
        args = (norm, *tensors, *ctx.constants)
        if _memory_is_needed(upstream):
            return _first_order(torch.ops.xent.cross_entropy_backward, upstream, logits, *args), *rest
        memory = logits.detach()
        torch.ops.xent.cross_entropy_backward_(upstream, memory, *args)
        return memory, *rest


class LinearCrossEntropy(torch.autograd.Function):
    """(input, weight, bias, needs, shift, workspace, dtype, *options) -> (loss, norm, deferred, *gradients, *stats)."""

    @staticmethod
    @_signed
    def forward(*args: Any) -> Any:
        loss, norm, deferred, gradients, stats = torch.ops.xent.linear_cross_entropy(*args)
        return loss, norm, deferred, *gradients, *stats

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        linear, options = inputs[:7], inputs[7:]
        _, norm, deferred, *rest = output
        gradients, stats = rest[:3], rest[3:]
        _keep_options(ctx, options)
        ctx.needs, ctx.linear = linear[3], linear[3:]
        ctx.dtypes = [linear[0].dtype, linear[1].dtype, (linear[1] if linear[2] is None else linear[2]).dtype]
        if ctx.reduction == "none":
            ctx.save_for_backward(norm, *linear[:3], *options[:_TENSORS])
            ctx.mark_non_differentiable(norm, deferred, *gradients, *stats)
        else:
            ctx.save_for_backward(deferred, *gradients)
            ctx.mark_non_differentiable(norm, deferred, *stats)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *more: Any) -> Any:
        rest = (None,) * (4 + len(Options._fields))
        _refuse_second(*more)
        if upstream is None:
            return None, None, None, *rest
        if ctx.reduction == "none":
            norm, *tensors = ctx.saved_tensors
            operation = torch.ops.xent.linear_cross_entropy_backward
            args = (*tensors[:3], *ctx.linear, *tensors[3:], *ctx.constants)
            gradients = _first_order(operation, upstream, norm, *args)
        else:
            deferred, *kept = ctx.saved_tensors
            gradients = [
                _scaled(ctx, grad, upstream, deferred) if need else None
                for grad, need in zip(kept, ctx.needs, strict=True)
            ]
        made = [
            grad.to(dtype) if need and grad is not None else None
            for grad, need, dtype in zip(gradients, ctx.needs, ctx.dtypes, strict=True)
        ]
        return *made, *rest


class _FirstOrder(torch.autograd.Function):
    """(operation, *args) -> operation(*args), whose own backward raises."""

    @staticmethod
    @_signed
    def forward(operation: Any, *args: Any) -> Any:
        made = operation(*args)
        return tuple(made) if isinstance(made, list) else made

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_NO_SECOND)


def _first_order(operation: Any, *args: Any) -> Any:
    """Return operation(*args); differentiating it raises, as it does by itself in a compiled graph."""
    return operation(*args) if torch.compiler.is_compiling() else _FirstOrder.apply(operation, *args)


def _keep_options(ctx: Any, options: Any) -> None:
    """Keep the constants; the tensors are saved apart."""
    ctx.reduction, ctx.kernel = options[_REDUCTION], options[_KERNEL]
    ctx.constants = options[_TENSORS:]


def _refuse_second(*kept_upstream: Tensor | None) -> None:
    """Raise if somebody differentiates a kept gradient.

    Not while compiling: there, outputs that nobody uses come with gradients too, and second derivatives of a compiled
    graph are an error of PyTorch's own.
    """
    if not torch.compiler.is_compiling() and any(grad is not None for grad in kept_upstream):
        raise RuntimeError(_NO_SECOND)


def _memory_is_needed(upstream: Tensor) -> bool:
    """Whether this backward may run again, be differentiated, or makes one gradient for each of a batch of upstreams.

    A compiled graph reuses memory by itself.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    # torch.autograd.grad(is_grads_batched=True)
    if torch._C._functorch.is_legacy_batchedtensor(upstream):  # pyright: ignore[reportAttributeAccessIssue]
        return True
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # pyright: ignore[reportAttributeAccessIssue]


def _scaled(ctx: Any, kept: Tensor, upstream: Tensor, deferred: Tensor) -> Tensor:
    """Return kept * upstream * deferred, in kept's memory unless that is needed.

    The product is rounded once: a 0-d factor would be rounded to kept's precision first.
    """
    if _memory_is_needed(upstream):
        return (kept * (upstream * deferred).reshape(1)).to(kept.dtype)
    # The kept gradient is an output of its Function; what leaves backward must not drag that graph along.
    kept = kept.detach()
    torch.ops.xent.scale_(kept, upstream, deferred, ctx.kernel)
    return kept
