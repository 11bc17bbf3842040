"""Autograd functions for eager calls without tracers, transforms or modes; they do not use custom operations.

All tensors for the backward pass are saved with `save_for_backward`, so that saved-tensor hooks see them, and a second
backward pass without retain_graph raises. For "mean" and "sum" the forward pass computes the gradients; the backward
pass multiplies them by the upstream scalar. It does so in place unless the graph is retained, so that it allocates no
memory of the gradient's size.
"""

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any, Protocol

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

__all__ = [
    "Passes",
    "WholePasses",
    "as_arguments",
    "cross_entropy",
    "is_simple",
    "linear_cross_entropy",
    "on_device",
    "once",
    "scaled",
]

_REPLAYED = frozenset(("triton",))
"""Backends whose kernels are launched through `xent.backends.torch.recorder`."""


class Passes(Protocol):
    """The forward and backward passes of calls on all classes (`WholePasses`) or on those of one rank.

    `saved` is the data for the backward pass of a gradient that the forward pass does not compute. `simple`: all
    upstream gradients are plain tensors and nothing is traced; otherwise a pass calls its custom operation.
    """

    keeps_entropy: bool
    """Whether that backward pass needs the entropy beside `saved`."""

    def logits_forward(self, logits: Tensor, grad: Tensor | None, keeps: bool, options: Options) -> Any:
        """Return (loss, saved if `keeps`, statistics). Write the gradient to `grad` if it is not None."""

    def logits_backward(self, upstream: jobs.Upstream, simple: bool, inplace: bool, *saved: Any) -> Tensor:
        """Return the gradient, for saved = (logits, saved, entropy, options)."""

    def linear_forward(self, linear: Linear, options: Options) -> Any:
        """Return (loss, deferred, gradients, statistics, saved)."""

    def linear_backward(self, upstream: jobs.Upstream, simple: bool, *saved: Any) -> Any:
        """Return the gradients, for saved = (linear, saved, entropy, options)."""


class WholePasses:
    """`Passes` on all classes."""

    keeps_entropy = True

    def logits_forward(self, logits: Tensor, grad: Tensor | None, keeps: bool, options: Options) -> Any:
        """See `Passes`."""
        norm = new_norm(logits) if keeps else None
        loss, stats = _run(options.kernel, logits, logits_driver.forward, logits, grad, norm, options)
        return loss, norm, stats

    def logits_backward(
        self, upstream: jobs.Upstream, simple: bool, inplace: bool, logits: Tensor, *saved: Any
    ) -> Tensor:
        """See `Passes`."""
        norm, entropy, options = saved
        entropy = None if upstream.entropy is None else entropy
        made: Tensor
        if simple:
            arguments = (upstream, logits, norm, entropy, options, inplace)
            made = _run(options.kernel, logits, logits_driver.backward, *arguments)
        else:
            made = torch.ops.xent.cross_entropy_backward(logits, norm, entropy, *upstream, *pack(options))
        return made

    def linear_forward(self, linear: Linear, options: Options) -> Any:
        """See `Passes`."""
        return _run(options.kernel, linear.input, linear_driver.forward, linear, options)

    def linear_backward(self, upstream: jobs.Upstream, simple: bool, linear: Linear, *saved: Any) -> Any:
        """See `Passes`."""
        norm, entropy, options = saved
        if not simple:
            return torch.ops.xent.linear_cross_entropy_backward(*as_arguments(linear), *upstream, *pack(options))
        return _run(options.kernel, linear.input, linear_driver.backward, upstream, linear, options, norm, entropy)


_WHOLE = WholePasses()


def cross_entropy(
    logits: Tensor, options: Options, needs_grad: bool, inplace: bool, passes: Passes = _WHOLE
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the statistics of logits (..., V)."""
    if needs_grad:
        loss, _, *stats = _apply_to_logits(logits, passes, options, inplace)
        return loss, stats
    loss, _, stats = passes.logits_forward(logits, None, False, options)
    return loss, stats


def linear_cross_entropy(linear: Linear, options: Options, passes: Passes = _WHOLE) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the statistics of hidden states and a classifier."""
    if any(linear.needs):
        loss, _, *stats = _apply_to_linear(linear.input, linear.weight, linear.bias, linear, passes, options)
        return loss, stats
    loss, _, _, stats, _ = passes.linear_forward(linear, options)
    return loss, stats


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
    """(logits, passes, options, inplace) -> (loss, anchor, *stats)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, passes: Passes, options: Options, inplace: bool) -> Any:
        ctx.passes, ctx.is_made = passes, makes_gradient_first(options.spec.reduction, logits.dtype)
        source = logits.detach()
        if ctx.is_made:
            grad = source if inplace else gradient_like(source)
            loss, _, stats = passes.logits_forward(source, grad, False, options)
            if inplace:
                torch.autograd.graph.increment_version(logits)
            ctx.save_for_backward(anchor := loss.new_empty(0), logits if inplace else grad)
        else:
            loss, saved, stats = passes.logits_forward(source, None, True, options)
            ctx.save_for_backward(anchor := loss.new_empty(0), logits, *_kept(ctx, saved, stats, options))
            ctx.inplace = inplace
        _finish(ctx, stats, options)
        return loss, anchor, *stats

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, _: Any, *of_stats: Any) -> Any:
        if ctx.is_made:
            if of_loss is None:
                return (None,) * 4
            anchor, kept = ctx.saved_tensors
            return once(anchor, lambda: scaled(ctx.rest[1], [kept], of_loss, None)[0]), None, None, None
        upstream = _upstream(ctx, of_loss, of_stats)
        if all(one is None for one in upstream):
            return (None,) * 4
        anchor, logits, saved, entropy, *tensors = ctx.saved_tensors

        def gradient() -> Tensor:
            simple = all(map(is_simple, upstream))
            reuse = simple and ctx.inplace and not private.keeps_graph()
            rest = (logits.detach(), saved, entropy, _restored(ctx, tensors))
            made: Tensor = ctx.passes.logits_backward(upstream, simple, reuse, *rest)
            if reuse:
                torch.autograd.graph.increment_version(logits)
            return made

        return once(anchor, gradient), None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """(input, weight, bias, linear, passes, options) -> (loss, anchor, *stats)."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear, passes: Passes, options: Options
    ) -> Any:
        loss, deferred, made, stats, saved = passes.linear_forward(linear, options)
        ctx.passes, ctx.is_made = passes, options.spec.reduction != "none"
        ctx.linear = (linear.shift, linear.workspace, linear.compute, linear.needs)
        ctx.dtypes = [source.dtype, weight.dtype, (weight if bias is None else bias).dtype]
        anchor = loss.new_empty(0)
        if ctx.is_made:
            ctx.save_for_backward(anchor, deferred, *made)
        else:
            ctx.save_for_backward(anchor, source, weight, bias, *_kept(ctx, saved, stats, options))
        _finish(ctx, stats, options)
        return loss, anchor, *stats

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, _: Any, *of_stats: Any) -> Any:
        needs = ctx.linear[-1]
        if ctx.is_made:
            if of_loss is None:
                return (None,) * 6
            anchor, deferred, *kept = ctx.saved_tensors
            needed = iter(scaled(ctx.rest[1], [*compress(kept, needs)], of_loss, deferred))
            made = [next(needed) if need else None for need in needs]
        else:
            upstream = _upstream(ctx, of_loss, of_stats)
            if all(one is None for one in upstream):
                return (None,) * 6
            anchor, source, weight, bias, saved, entropy, *tensors = ctx.saved_tensors
            linear, simple = Linear(source.detach(), weight.detach(), bias, *ctx.linear), all(map(is_simple, upstream))
            with torch.no_grad():
                made = ctx.passes.linear_backward(upstream, simple, linear, saved, entropy, _restored(ctx, tensors))
        grads = [
            once(anchor, partial(cast, grad, dtype)) if need and grad is not None else None
            for grad, dtype, need in zip(made, ctx.dtypes, needs, strict=True)
        ]
        return *grads, None, None, None


_apply_to_logits, _apply_to_linear = private.apply_of(_CrossEntropy), private.apply_of(_LinearCrossEntropy)


def _kept(ctx: Any, saved: Tensor | None, stats: list[Tensor], options: Options) -> tuple[Tensor | None, ...]:
    """Return the data for the backward pass: `saved`, the entropy, and the tensors among the options."""
    ctx.number = None if isinstance(options.normalizer, Tensor) else options.normalizer
    keeps = saved is not None and ctx.passes.keeps_entropy
    entropy = found_entropy(options.spec.reduction, options.spec.stats, stats) if keeps else None
    return saved, entropy, *(value if isinstance(value, Tensor) else None for value in options.tensors)


def _finish(ctx: Any, stats: list[Tensor], options: Options) -> None:
    ctx.rest = options[-2:]
    if stats:
        ctx.mark_non_differentiable(*constant(options.spec.reduction, options.spec.stats, stats))
    ctx.set_materialize_grads(False)


def as_arguments(linear: Linear) -> tuple[Any, ...]:
    """Return the arguments of custom operations."""
    first = (linear.input, linear.weight, linear.bias, linear.needs)
    return *first, linear.shift, linear.workspace, linear.compute


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


def scaled(kernel: str, kept: list[Tensor], upstream: Any, deferred: Tensor | None) -> list[Tensor]:
    """Return kept * upstream * deferred, rounded once; in place unless `kept` is needed again."""
    if is_simple(upstream):
        arguments = (kept[0], jobs.scale, kernel, [grad.detach() for grad in kept], upstream, deferred)
        if torch.is_grad_enabled():
            with torch.no_grad():
                made: list[Tensor] = on_device(*arguments, False)
        else:
            made = on_device(*arguments, not private.keeps_graph())
        return made
    factor = upstream if deferred is None else upstream * deferred
    # PyTorch would round a 0-d factor to the dtype of `kept` first.
    return [(grad * factor.reshape(1)).to(grad.dtype) for grad in kept]


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
