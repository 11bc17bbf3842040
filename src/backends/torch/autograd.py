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
    "in_dtypes",
    "keep_linear",
    "keep_logits",
    "linear_gradients",
    "logits_gradients",
    "made_gradients",
    "refusals",
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
        keep_logits(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, kept_upstream: Any, *of_stats: Any) -> Any:
        operation = torch.ops.xent.cross_entropy_backward
        return logits_gradients(ctx, operation, of_loss, kept_upstream, of_stats)


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
        keep_linear(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, *more: Any) -> Any:
        operation = torch.ops.xent.linear_cross_entropy_backward
        return linear_gradients(ctx, operation, of_loss, more[:4], more[4:])


def keep_logits(ctx: Any, inputs: Any, output: Any, where: int = 0) -> None:
    """Save what the backward pass needs. The options come after `where` arguments that describe a shard."""
    (logits, *_), (_, kept, *stats) = inputs, output
    options = _keep_options(ctx, inputs[2:], where)
    ctx.is_made = makes_gradient_first(ctx.reduction, logits.dtype)
    if ctx.is_made:
        ctx.save_for_backward(kept)
        ctx.mark_non_differentiable(*stats)
    else:
        entropy = [] if where else [found_entropy(ctx.reduction, ctx.stats, stats)]  # that of a shard is in `kept`
        ctx.save_for_backward(logits, kept, *entropy, *options[:TENSORS])
        ctx.mark_non_differentiable(kept, *constant(ctx.reduction, ctx.stats, stats))
    ctx.set_materialize_grads(False)


def logits_gradients(ctx: Any, operation: Any, of_loss: Tensor | None, of_kept: Any, of_stats: Any) -> Any:
    """Return the gradients of all inputs; `operation` computes that of the logits."""
    rest = (None,) * (1 + len(ctx.where) + ARGUMENTS)
    if differentiated(of_kept):
        return refused(of_kept, of_kept), *rest
    upstream = upstream_of(ctx.reduction, ctx.stats, of_loss, of_stats)
    if all(one is None for one in upstream):
        return None, *rest
    if ctx.is_made:
        return scaled(ctx, ctx.saved_tensors[0], of_loss, None), *rest
    return first_order(operation, *_saved(ctx, upstream)), *rest


def keep_linear(ctx: Any, inputs: Any, output: Any, where: int = 0) -> None:
    """Save what the backward pass needs, as `keep_logits` does. A shard's data is an output before the statistics."""
    linear, (_, deferred, *rest) = inputs[:7], output
    first = 4 if where else 3
    gradients, kept, stats = rest[:3], rest[3:first], rest[first:]
    options = _keep_options(ctx, inputs[7:], where)
    ctx.needs, ctx.linear = linear[3], linear[3:]
    ctx.dtypes = [linear[0].dtype, linear[1].dtype, (linear[1] if linear[2] is None else linear[2]).dtype]
    ctx.is_made = ctx.reduction != "none"
    if ctx.is_made:
        ctx.save_for_backward(deferred, *gradients)
        ctx.mark_non_differentiable(deferred, *kept, *stats)
    else:
        ctx.save_for_backward(*linear[:3], *kept, *options[:TENSORS])
        ctx.mark_non_differentiable(deferred, *gradients, *kept, *constant(ctx.reduction, ctx.stats, stats))
    ctx.set_materialize_grads(False)


def linear_gradients(ctx: Any, operation: Any, of_loss: Tensor | None, of_made: Any, of_stats: Any) -> Any:
    """Return the gradients of all inputs. `of_made` are the upstream gradients of deferred and of the gradients."""
    rest = (None,) * (4 + len(ctx.where) + ARGUMENTS)
    if differentiated(*of_made):
        return *refusals(ctx, of_made[1:]), *rest
    upstream = upstream_of(ctx.reduction, ctx.stats, of_loss, of_stats)
    if all(one is None for one in upstream):
        return None, None, None, *rest
    if ctx.is_made:
        return *made_gradients(ctx, of_loss), *rest
    tensors = ctx.saved_tensors
    kept, options = tensors[3:-TENSORS], tensors[-TENSORS:]
    made = first_order(operation, *tensors[:3], *ctx.linear, *kept, *upstream, *ctx.where, *options, *ctx.constants)
    return *in_dtypes(ctx, made), *rest


def refusals(ctx: Any, upstream: Any) -> list[Any]:
    """Raise for a second derivative of the gradients that a forward pass has computed: see `refused`."""
    return [
        None if grad is None or dtype is None else refused(grad, grad).to(dtype)
        for grad, dtype in zip(upstream, ctx.dtypes, strict=True)
    ]


def made_gradients(ctx: Any, upstream: Any) -> list[Any]:
    """Return the gradients that the forward pass has computed, times the upstream gradient of the loss."""
    deferred, *kept = ctx.saved_tensors
    pairs = zip(kept, ctx.needs, strict=True)
    return in_dtypes(ctx, [scaled(ctx, grad, upstream, deferred) if need else None for grad, need in pairs])


def in_dtypes(ctx: Any, gradients: Any) -> list[Any]:
    """Return the gradients that are needed in the dtypes of the inputs, None for the others."""
    return [
        grad.to(dtype) if need and grad is not None else None
        for grad, need, dtype in zip(gradients, ctx.needs, ctx.dtypes, strict=True)
    ]


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


def _keep_options(ctx: Any, args: Any, where: int = 0) -> Any:
    """Store the constants, and return the options; their tensors are saved separately."""
    ctx.where, options = args[:where], args[where:]
    ctx.reduction, ctx.stats, ctx.kernel = reduction_of(options), stats_of(options), options[-1]
    ctx.constants = options[TENSORS:]
    return options


def _saved(ctx: Any, upstream: Upstream) -> tuple[Any, ...]:
    """Return the arguments of the operation that computes the gradient of logits."""
    saved = ctx.saved_tensors  # read once: with use_reentrant=False, a checkpoint can refuse a second look
    logits, *kept = saved[:-TENSORS]
    if not ctx.where and upstream.entropy is None:
        kept[-1] = None
    return logits, *kept, *upstream, *ctx.where, *saved[-TENSORS:], *ctx.constants


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
