"""Autograd functions for eager calls without tracers, transforms or modes; they do not use custom operations.

All tensors for the backward pass are saved with `save_for_backward`, so that saved-tensor hooks see them, and a second
backward pass without retain_graph raises. For "mean" and "sum" the forward pass computes the gradients; the backward
pass multiplies them by the upstream scalar. It does so in place unless the graph is retained, so that it allocates no
memory of the gradient's size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import job as jobs
from xent.backends.torch import linear as linear_driver
from xent.backends.torch import logits as logits_driver
from xent.backends.torch import private
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.logits import makes_gradient_first, new_norm
from xent.backends.torch.ops import NO_SECOND, undisturbed
from xent.backends.torch.options import Options, pack
from xent.backends.torch.replay import replayed
from xent.backends.torch.rows import cast, gradient_like
from xent.backends.torch.statistics import constant, found_entropy, upstream_of

__all__ = ["cross_entropy", "is_simple", "linear_cross_entropy", "on_device", "once", "scaled"]

_REPLAYED = frozenset(("triton",))
"""Backends whose kernels are launched through `xent.backends.torch.recorder`."""


def cross_entropy(logits: Tensor, options: Options, needs_grad: bool, inplace: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the statistics of logits (..., V)."""
    if needs_grad:
        loss, _, *stats = _apply_to_logits(logits, options, inplace)
        return loss, stats
    loss, stats = _run(options.kernel, logits, logits_driver.forward, logits, None, None, options)
    return loss, stats


def linear_cross_entropy(linear: Linear, options: Options) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the statistics of hidden states and a classifier."""
    if any(linear.needs):
        loss, _, *stats = _apply_to_linear(linear.input, linear.weight, linear.bias, linear, options)
        return loss, stats
    made = _run(options.kernel, linear.input, linear_driver.forward, linear, options)
    return made.loss, made.stats


def on_device(tensor: Tensor, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with the tensor's device as the current device, and without autocast."""
    if private.any_autocast() or (tensor.is_cuda and tensor.device.index != torch.cuda.current_device()):
        return undisturbed(function, tensor.device, *args)
    return function(*args)


def _run(kernel: str, tensor: Tensor, function: Callable[..., Any], *args: Any) -> Any:
    """Call `on_device`. If the backend's launches can be recorded, repeat an earlier call of the same kind."""
    if kernel in _REPLAYED:
        return on_device(tensor, replayed, function, *args)
    return on_device(tensor, function, *args)


class _CrossEntropy(torch.autograd.Function):
    """(logits, options, inplace) -> (loss, anchor, *stats)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, options: Options, inplace: bool) -> Any:
        ctx.kernel, ctx.is_made = options.kernel, makes_gradient_first(options.spec.reduction, logits.dtype)
        if ctx.is_made:
            source = logits.detach()
            grad = source if inplace else gradient_like(source)
            loss, stats = _run(options.kernel, logits, logits_driver.forward, source, grad, None, options)
            if inplace:
                torch.autograd.graph.increment_version(logits)
            ctx.save_for_backward(anchor := loss.new_empty(0), logits if inplace else grad)
        else:
            norm = new_norm(logits)
            loss, stats = _run(options.kernel, logits, logits_driver.forward, logits.detach(), None, norm, options)
            entropy = found_entropy(options.spec.reduction, options.spec.stats, stats)
            ctx.save_for_backward(anchor := loss.new_empty(0), logits, norm, entropy, *_tensors(options.tensors))
            ctx.rest, ctx.inplace = options[-2:], inplace
            ctx.number = None if isinstance(options.normalizer, Tensor) else options.normalizer
        if stats:
            ctx.mark_non_differentiable(*constant(options.spec.reduction, options.spec.stats, stats))
        ctx.set_materialize_grads(False)
        return loss, anchor, *stats

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, _: Any, *of_stats: Any) -> Any:
        if ctx.is_made:
            if of_loss is None:
                return None, None, None
            anchor, kept = ctx.saved_tensors
            return once(anchor, lambda: scaled(ctx.kernel, kept, of_loss, None)), None, None
        upstream = _upstream(ctx, of_loss, of_stats)
        if all(one is None for one in upstream):
            return None, None, None
        anchor, logits, norm, entropy, *tensors = ctx.saved_tensors
        entropy = None if upstream.entropy is None else entropy
        options = _restored(ctx, tensors)

        def gradient() -> Tensor:
            if all(map(is_simple, upstream)):
                reuse = ctx.inplace and not private.keeps_graph()
                args = (upstream, logits.detach(), norm, entropy, options, reuse)
                made: Tensor = _run(options.kernel, logits, logits_driver.backward, *args)
                if reuse:
                    torch.autograd.graph.increment_version(logits)
            else:
                operation = torch.ops.xent.cross_entropy_backward
                made = operation(logits.detach(), norm, entropy, *upstream, *pack(options))
            return made

        return once(anchor, gradient), None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """(input, weight, bias, linear, options) -> (loss, anchor, *stats)."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear, options: Options) -> Any:
        made_forward = _run(options.kernel, source, linear_driver.forward, linear, options)
        loss, deferred, made, stats, norm = made_forward
        ctx.rest, ctx.kernel, ctx.is_made = options[-2:], options.kernel, options.spec.reduction != "none"
        ctx.needs, ctx.linear = linear.needs, (linear.shift, linear.workspace, linear.compute)
        ctx.dtypes = [source.dtype, weight.dtype, (weight if bias is None else bias).dtype]
        if not ctx.is_made:
            ctx.number = None if isinstance(options.normalizer, Tensor) else options.normalizer
            entropy = None if norm is None else found_entropy(options.spec.reduction, options.spec.stats, stats)
            kept = (source, weight, bias, norm, entropy)
            ctx.save_for_backward(anchor := loss.new_empty(0), *kept, *_tensors(options.tensors))
        else:
            ctx.save_for_backward(anchor := loss.new_empty(0), deferred, *made)
        if stats:
            ctx.mark_non_differentiable(*constant(options.spec.reduction, options.spec.stats, stats))
        ctx.set_materialize_grads(False)
        return loss, anchor, *stats

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, _: Any, *of_stats: Any) -> Any:
        if ctx.is_made:
            if of_loss is None:
                return (None,) * 5
            anchor, deferred, *kept = ctx.saved_tensors
            made = [
                scaled(ctx.kernel, grad, of_loss, deferred) if need else None
                for grad, need in zip(kept, ctx.needs, strict=True)
            ]
        else:
            upstream = _upstream(ctx, of_loss, of_stats)
            if all(one is None for one in upstream):
                return (None,) * 5
            anchor, source, weight, bias, norm, entropy, *tensors = ctx.saved_tensors
            options, (shift, workspace, compute) = _restored(ctx, tensors), ctx.linear
            if all(map(is_simple, upstream)):
                linear = Linear(source.detach(), weight.detach(), bias, shift, workspace, compute, ctx.needs)
                with torch.no_grad():
                    call = (linear_driver.backward, upstream, linear, options, norm, entropy)
                    made = _run(options.kernel, source, *call)
            else:
                args = (source, weight, bias, ctx.needs, shift, workspace, compute, *upstream)
                made = torch.ops.xent.linear_cross_entropy_backward(*args, *pack(options))
        grads = [
            once(anchor, partial(cast, grad, dtype)) if need and grad is not None else None
            for grad, dtype, need in zip(made, ctx.dtypes, ctx.needs, strict=True)
        ]
        return *grads, None, None


_apply_to_logits, _apply_to_linear = private.apply_of(_CrossEntropy), private.apply_of(_LinearCrossEntropy)


def _tensors(values: Any) -> tuple[Tensor | None, ...]:
    return tuple(value if isinstance(value, Tensor) else None for value in values)


def _restored(ctx: Any, tensors: Any) -> Options:
    target, weight, sample_weight, normalizer, *sampling = tensors
    number = normalizer if ctx.number is None else ctx.number
    return Options(target, weight, sample_weight, number, *sampling, *ctx.rest)


def _upstream(ctx: Any, of_loss: Tensor | None, of_stats: Any) -> jobs.Upstream:
    spec = ctx.rest[0]
    return upstream_of(spec.reduction, spec.stats, of_loss, of_stats)


def is_simple(upstream: Tensor | None) -> bool:
    """Whether an upstream gradient is a plain tensor (not batched, fake or a negated view), and nothing is traced."""
    return upstream is None or (
        type(upstream) in private.PLAIN_TYPES
        and not private.is_watched()
        and not private.is_batched_gradient(upstream)
        and not upstream.is_neg()
    )


def scaled(kernel: str, kept: Tensor, upstream: Any, deferred: Tensor | None) -> Tensor:
    """Return kept * upstream * deferred, rounded once; in place unless `kept` is needed again."""
    if is_simple(upstream):
        arguments = (kept, jobs.scale, kernel, kept.detach(), upstream, deferred)
        if torch.is_grad_enabled():
            with torch.no_grad():
                made: Tensor = on_device(*arguments, False)
        else:
            made = on_device(*arguments, not private.keeps_graph())
        return made
    factor = upstream if deferred is None else upstream * deferred
    # PyTorch would round a 0-d factor to the dtype of `kept` first.
    product: Tensor = (kept * factor.reshape(1)).to(kept.dtype)
    return product


class _Once(torch.autograd.Function):
    """(anchor, make) -> make(). Its backward pass, a second derivative, raises.

    The anchor is an empty output of the loss's Function. It connects the gradient to the inputs in the autograd graph.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(NO_SECOND)


def once(anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Return make(); if PyTorch records the backward pass (create_graph=True), differentiating the result raises."""
    if not torch.is_grad_enabled():
        return make()
    made: Tensor = _Once.apply(anchor, make)
    return made
