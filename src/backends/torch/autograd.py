"""Autograd functions around the custom operations, for compilers, transforms and modes.

A gradient that the forward pass computes is an output of its Function. Differentiating it a second time then reaches
that output and raises an error, instead of giving a wrong number. `eager` has the same functions without custom
operations.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import private
from xent.backends.torch.job import Upstream
from xent.backends.torch.logits import makes_gradient_first
from xent.backends.torch.options import ARGUMENTS, TENSORS, reduction_of, stats_of
from xent.backends.torch.statistics import constant, found_entropy, upstream_of

__all__ = [
    "CrossEntropy",
    "CrossEntropyInplace",
    "LinearCrossEntropy",
    "asks_for_gradient",
    "differentiated",
    "first_order",
    "refused",
    "scaled",
    "signed",
]


def asks_for_gradient(*tensors: Tensor | None) -> list[bool]:
    """Return for each tensor whether it requires a gradient."""
    enabled = torch.is_grad_enabled()
    return [enabled and tensor is not None and tensor.requires_grad for tensor in tensors]


def signed(function: Any) -> Any:
    """Cache the signature of `function`, which torch.autograd.Function otherwise computes at every call."""
    function.__signature__ = inspect.signature(function)
    return function


class CrossEntropy(torch.autograd.Function):
    """(logits, needs_grad, *options) -> (loss, kept, *stats)."""

    @staticmethod
    @signed
    def forward(logits: Tensor, needs_grad: bool, *options: Any) -> Any:
        loss, kept, stats = torch.ops.xent.cross_entropy(logits, needs_grad, *options)
        return loss, kept, *stats

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, _, *options = inputs
        _, kept, *stats = output
        _keep_options(ctx, options)
        ctx.is_made = makes_gradient_first(ctx.reduction, logits.dtype)
        if ctx.is_made:
            ctx.save_for_backward(kept)
            ctx.mark_non_differentiable(*stats)
        else:
            entropy = found_entropy(ctx.reduction, ctx.stats, stats)
            ctx.save_for_backward(logits, kept, entropy, *options[:TENSORS])
            ctx.mark_non_differentiable(kept, *constant(ctx.reduction, ctx.stats, stats))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, kept_upstream: Any, *of_stats: Any) -> Any:
        rest = (None,) * (1 + ARGUMENTS)
        if differentiated(kept_upstream):
            return refused(kept_upstream, kept_upstream), *rest
        upstream = upstream_of(ctx.reduction, ctx.stats, of_loss, of_stats)
        if all(one is None for one in upstream):
            return None, *rest
        if ctx.is_made:
            return scaled(ctx, ctx.saved_tensors[0], of_loss, None), *rest
        args = _saved(ctx, upstream)
        return first_order(torch.ops.xent.cross_entropy_backward, *args), *rest


class CrossEntropyInplace(torch.autograd.Function):
    """(logits, *options) -> (loss, *stats). The gradient overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *options: Any) -> Any:
        _keep_options(ctx, options)
        ctx.is_made = makes_gradient_first(ctx.reduction, logits.dtype)
        # Save the logits themselves, so that a second derivative leads back to them and raises an error.
        if ctx.is_made:
            loss, stats = torch.ops.xent.cross_entropy_(logits.detach(), *options)
            ctx.save_for_backward(logits)
        else:
            loss, norm, stats = torch.ops.xent.cross_entropy(logits, True, *options)
            entropy = found_entropy(ctx.reduction, ctx.stats, stats)
            ctx.save_for_backward(logits, norm, entropy, *options[:TENSORS])
        ctx.mark_non_differentiable(*constant(ctx.reduction, ctx.stats, stats))
        ctx.set_materialize_grads(False)
        return loss, *stats

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, *of_stats: Any) -> Any:
        rest = (None,) * ARGUMENTS
        upstream = upstream_of(ctx.reduction, ctx.stats, of_loss, of_stats)
        if all(one is None for one in upstream):
            return None, *rest
        if ctx.is_made:
            return first_order(scaled, ctx, ctx.saved_tensors[0], of_loss, None), *rest
        logits, *args = _saved(ctx, upstream)
        if any(one is not None and _memory_is_needed(one) for one in upstream):
            return first_order(torch.ops.xent.cross_entropy_backward, logits, *args), *rest
        memory = logits.detach()
        torch.ops.xent.cross_entropy_backward_(memory, *args)
        return memory, *rest


class LinearCrossEntropy(torch.autograd.Function):
    """(input, weight, bias, needs, shift, workspace, dtype, *options) -> (loss, deferred, *gradients, *stats)."""

    @staticmethod
    @signed
    def forward(*args: Any) -> Any:
        loss, deferred, gradients, stats = torch.ops.xent.linear_cross_entropy(*args)
        return loss, deferred, *gradients, *stats

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        linear, options = inputs[:7], inputs[7:]
        _, deferred, *rest = output
        gradients, stats = rest[:3], rest[3:]
        _keep_options(ctx, options)
        ctx.needs, ctx.linear = linear[3], linear[3:]
        ctx.dtypes = [linear[0].dtype, linear[1].dtype, (linear[1] if linear[2] is None else linear[2]).dtype]
        if ctx.reduction == "none":
            ctx.save_for_backward(*linear[:3], *options[:TENSORS])
            ctx.mark_non_differentiable(deferred, *gradients, *constant(ctx.reduction, ctx.stats, stats))
        else:
            ctx.save_for_backward(deferred, *gradients)
            ctx.mark_non_differentiable(deferred, *stats)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, *more: Any) -> Any:
        rest = (None,) * (4 + ARGUMENTS)
        if differentiated(*more[:4]):
            return *(
                None if grad is None else refused(grad, grad).to(dtype)
                for grad, dtype in zip(more[1:4], ctx.dtypes, strict=True)
            ), *rest
        upstream = upstream_of(ctx.reduction, ctx.stats, of_loss, more[4:])
        if all(one is None for one in upstream):
            return None, None, None, *rest
        if ctx.reduction == "none":
            tensors = ctx.saved_tensors
            operation = torch.ops.xent.linear_cross_entropy_backward
            args = (*tensors[:3], *ctx.linear, *upstream, *tensors[3:], *ctx.constants)
            gradients = first_order(operation, *args)
        else:
            deferred, *kept = ctx.saved_tensors
            gradients = [
                scaled(ctx, grad, of_loss, deferred) if need else None
                for grad, need in zip(kept, ctx.needs, strict=True)
            ]
        made = [
            grad.to(dtype) if need and grad is not None else None
            for grad, need, dtype in zip(gradients, ctx.needs, ctx.dtypes, strict=True)
        ]
        return *made, *rest


class _FirstOrder(torch.autograd.Function):
    """(operation, *args) -> operation(*args). Its backward pass, a second derivative, raises."""

    @staticmethod
    @signed
    def forward(operation: Any, *args: Any) -> Any:
        made = operation(*args)
        return tuple(made) if isinstance(made, list) else made

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in inputs))

    @staticmethod
    def vmap(info: Any, in_dims: Any, operation: Any, *args: Any) -> Any:
        """Run the operation once per upstream gradient of a batch; torch.func.jacrev has one per row."""
        results = []
        for entry in range(info.batch_size):
            chosen = [
                arg.select(dim, entry) if isinstance(dim, int) else arg
                for arg, dim in zip(args, in_dims[1:], strict=True)
            ]
            results.append(_FirstOrder.apply(operation, *chosen))
        if isinstance(results[0], tuple):
            return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])
        return torch.stack(results), 0

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        first = next(grad for grad in upstream if grad is not None)
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(refused(first, like) if needs else None for like, needs in needed)


def first_order(operation: Any, *args: Any) -> Any:
    """Return operation(*args). Differentiating the result raises; in a compiled graph PyTorch itself raises."""
    return operation(*args) if torch.compiler.is_dynamo_compiling() else _FirstOrder.apply(operation, *args)


def _keep_options(ctx: Any, options: Any) -> None:
    """Store the constants; the tensors are saved separately."""
    ctx.reduction, ctx.stats, ctx.kernel = reduction_of(options), stats_of(options), options[-1]
    ctx.constants = options[TENSORS:]


def _saved(ctx: Any, upstream: Upstream) -> tuple[Any, ...]:
    """Return the arguments of the operation that computes the gradient of logits."""
    logits, norm, entropy, *tensors = ctx.saved_tensors
    return logits, norm, None if upstream.entropy is None else entropy, *upstream, *tensors, *ctx.constants


def refused(upstream: Tensor, like: Tensor) -> Tensor:
    """Raise for a second derivative. While a tracer runs, which may not use it, return a tensor that raises later."""
    refused: Tensor = torch.ops.xent.second_derivative(upstream, like)
    return refused


def differentiated(*kept_upstream: Tensor | None) -> bool:
    """Return whether a gradient of the forward pass is being differentiated.

    While Dynamo traces, return False: then unused outputs have upstream gradients too, and PyTorch itself raises for
    second derivatives of a compiled graph.
    """
    return not torch.compiler.is_dynamo_compiling() and any(grad is not None for grad in kept_upstream)


def _memory_is_needed(upstream: Tensor) -> bool:
    """Whether the stored gradient must not be overwritten.

    That is so if this backward pass may run again, is differentiated, or has a batch of upstream gradients. Also in a
    compiled graph, which reuses memory by itself.
    """
    return _is_transformed(upstream) or private.keeps_graph()


def _is_transformed(upstream: Tensor) -> bool:
    """Whether `upstream` is recorded, batched or has a tangent, which an in-place operation would ignore."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or private.transforms_possible():
        return True
    return private.forward_mode() or private.is_batched_gradient(upstream)


def scaled(ctx: Any, kept: Tensor, upstream: Any, deferred: Tensor | None) -> Tensor:
    """Return kept * upstream * deferred, rounded once; in place unless `kept` is still needed."""
    if not _memory_is_needed(upstream):
        # The kept gradient is an output of its Function. The result of backward must not refer to that graph.
        kept = kept.detach()
        torch.ops.xent.scale_(kept, upstream, deferred, ctx.kernel)
        return kept
    if not _is_transformed(upstream):
        made: Tensor = torch.ops.xent.scaled(kept, upstream, deferred, ctx.kernel)
        return made
    # PyTorch would round a 0-d factor to the dtype of `kept` first.
    factor = upstream if deferred is None else upstream * deferred
    product: Tensor = (kept * factor.reshape(1)).to(kept.dtype)
    return product
