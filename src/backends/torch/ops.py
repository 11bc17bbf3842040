"""The custom operations of xent, which torch.compile, autocast, fake and meta tensors see. They have no autograd.

`autograd` adds autograd around them with torch.autograd.Function, because torch.library.register_autograd does not
work under torch.func and cannot reuse the logits' memory. Each operation has a fake implementation for shapes and
dtypes. Eager calls do not use the operations (`eager`).

An operation returns `kept`, the data for its backward pass: the gradient, if the forward pass computes it (empty if
none is needed), otherwise the log-sum-exp parts `norm` (3, N). It also returns `deferred`, a factor by which the
backward pass multiplies a kept gradient.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import job as jobs
from xent.backends.torch import linear as linear_driver
from xent.backends.torch import logits as logits_driver
from xent.backends.torch import target_gradient
from xent.backends.torch.facts import accumulation_dtype
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.logits import makes_gradient_first, new_norm
from xent.backends.torch.options import SCHEMA, accuracy_is_per_row, reduction_of, stats_of, unpack
from xent.backends.torch.product_sum import kept_dtype
from xent.backends.torch.rows import gradient_like
from xent.backends.torch.steps import weighed_sum

__all__ = [
    "LINEAR",
    "NO_SECOND",
    "UPSTREAM",
    "fake_gradients",
    "fake_results",
    "linear_of",
    "operation",
    "undisturbed",
]

NO_SECOND = (
    "xent computes no second derivatives: its gradients cannot be differentiated again. Use the plain framework "
    "loss where create_graph=True is needed"
)

_LIBRARY = torch.library.Library("xent", "DEF")
LINEAR = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, bool[] needs, int shift, int? workspace, "
    "ScalarType compute"
)
UPSTREAM = "Tensor? loss, Tensor? lse, Tensor? nll, Tensor? entropy"
"""The fields of a `xent.backends.torch.job.Upstream`."""


def undisturbed(function: Callable[..., Any], device: torch.device, *args: Any) -> Any:
    """Call `function` without autocast, and with that device as the current one, on which Triton launches."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return undisturbed(function, device, *args)
    if not (torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)):
        return function(*args)
    with torch.autocast(device.type, enabled=False):
        return function(*args)


def operation(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as an operation for all devices, and `fake` as its fake implementation."""
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, lambda *args: undisturbed(function, args[0].device, *args), "CompositeExplicitAutograd")
        torch.library.register_fake(f"xent::{name}", fake, lib=_LIBRARY)
        return function

    return register


def fake_results(shape: torch.Size, acc: torch.dtype, device: torch.device, options: Any) -> Any:
    """Return empty (loss, deferred, stats); results per row are (N,).

    Sizes may be symbolic. `math.prod` keeps them symbolic; `shape.numel()` would specialise them and cause
    recompilations.
    """
    count = math.prod(shape)

    def one(names_rows: bool, dtype: torch.dtype = acc) -> Tensor:
        return torch.empty((count,) if names_rows else (), dtype=dtype, device=device)

    each_row = reduction_of(options) == "none"
    makers = {
        "lse": lambda: one(True),
        "nll": lambda: one(True),
        "entropy": lambda: one(True),
        "predictions": lambda: one(True, torch.int64),
        "log_sum_sq_probs": lambda: one(True),
        "mean_logit": lambda: one(True),
        "z_loss": lambda: one(each_row),
        "accuracy": lambda: one(accuracy_is_per_row(options)),
        "count": lambda: one(False, torch.int64),
    }
    return one(each_row), one(False), [makers[name]() for name in stats_of(options)]


def _fake_cross_entropy(logits: Tensor, needs_grad: bool, *options: Any) -> Any:
    loss, _, stats = fake_results(logits.shape[:-1], accumulation_dtype(logits.dtype), logits.device, options)
    if not needs_grad:
        kept = logits.new_empty(0)
    elif makes_gradient_first(reduction_of(options), logits.dtype):
        kept = gradient_like(logits)
    else:
        acc = accumulation_dtype(logits.dtype)
        kept = logits.new_empty((3, math.prod(logits.shape[:-1])), dtype=acc)
    return loss, kept, stats


@operation(
    f"cross_entropy(Tensor logits, bool needs_grad, {SCHEMA}) -> (Tensor loss, Tensor kept, Tensor[] stats)",
    _fake_cross_entropy,
)
def _cross_entropy(logits: Tensor, needs_grad: bool, *args: Any) -> Any:
    options = unpack(args)
    grad = norm = None
    if needs_grad and makes_gradient_first(options.spec.reduction, logits.dtype):
        grad = gradient_like(logits)
    elif needs_grad:
        norm = new_norm(logits)
    loss, stats = logits_driver.forward(logits, grad, norm, options)
    kept = norm if grad is None else grad
    return loss, logits.new_empty(0) if kept is None else kept, stats


def _fake_cross_entropy_(logits: Tensor, *options: Any) -> Any:
    loss, _, stats = fake_results(logits.shape[:-1], accumulation_dtype(logits.dtype), logits.device, options)
    return loss, stats


@operation(
    f"cross_entropy_(Tensor(a!) logits, {SCHEMA}) -> (Tensor loss, Tensor[] stats)",
    _fake_cross_entropy_,
)
def _cross_entropy_(logits: Tensor, *args: Any) -> Any:
    """Overwrite the logits with their gradient, if the forward pass computes it."""
    made = logits_driver.forward(logits, logits, None, unpack(args))
    torch.autograd.graph.increment_version(logits)
    return made


@operation(
    f"cross_entropy_backward(Tensor logits, Tensor norm, Tensor? found_entropy, {UPSTREAM}, {SCHEMA}) -> Tensor",
    lambda logits, *args: gradient_like(logits),
)
def _cross_entropy_backward(logits: Tensor, norm: Tensor, entropy: Tensor | None, *args: Any) -> Tensor:
    return logits_driver.backward(jobs.Upstream(*args[:4]), logits, norm, entropy, unpack(args[4:]))


@operation(
    f"cross_entropy_backward_(Tensor(a!) logits, Tensor norm, Tensor? found_entropy, {UPSTREAM}, {SCHEMA}) -> ()",
    lambda logits, *args: None,
)
def _cross_entropy_backward_(logits: Tensor, norm: Tensor, entropy: Tensor | None, *args: Any) -> None:
    """Overwrite the logits with their gradient."""
    logits_driver.backward(jobs.Upstream(*args[:4]), logits, norm, entropy, unpack(args[4:]), inplace=True)
    torch.autograd.graph.increment_version(logits)


def fake_gradients(linear: Linear, wanted: bool) -> list[Tensor]:
    """Return empty gradients of input, weight and bias; of size 0 if they are not needed or not `wanted`."""
    sources = (linear.input, linear.weight, linear.bias)
    return [
        source.new_empty(source.shape, dtype=kept_dtype(source.dtype))
        if source is not None and wanted and need
        else (linear.weight if source is None else source).new_empty(0)
        for source, need in zip(sources, linear.needs, strict=True)
    ]


def linear_of(args: tuple[Any, ...]) -> Linear:
    """Return the call with the arguments `LINEAR`."""
    source, weight, bias, needs, shift, workspace, compute = args[:7]
    return Linear(source, weight, bias, shift, workspace, compute, tuple(needs))


def _fake_linear(*args: Any) -> Any:
    linear, options = linear_of(args), args[7:]
    acc = accumulation_dtype(linear.compute)
    loss, deferred, stats = fake_results(linear.input.shape[:-1], acc, linear.input.device, options)
    return loss, deferred, fake_gradients(linear, reduction_of(options) != "none"), stats


@operation(
    f"linear_cross_entropy({LINEAR}, {SCHEMA}) -> (Tensor loss, Tensor deferred, Tensor[] gradients, Tensor[] stats)",
    _fake_linear,
)
def _linear_cross_entropy(*args: Any) -> Any:
    linear = linear_of(args)
    loss, deferred, gradients, stats, _ = linear_driver.forward(linear, unpack(args[7:]))
    return loss, loss.new_ones(()) if deferred is None else deferred, gradients, stats


@operation(
    f"linear_cross_entropy_backward({LINEAR}, {UPSTREAM}, {SCHEMA}) -> Tensor[]",
    lambda *args: fake_gradients(linear_of(args), True),
)
def _linear_cross_entropy_backward(*args: Any) -> list[Tensor]:
    return linear_driver.backward(jobs.Upstream(*args[7:11]), linear_of(args), unpack(args[11:]))


@operation(
    f"target_gradient(Tensor logits, Tensor? loss, Tensor? nll, {SCHEMA}) -> Tensor",
    lambda logits, loss, nll, target, *options: target.new_empty(target.shape),
)
def _target_gradient(logits: Tensor, loss: Tensor | None, nll: Tensor | None, *args: Any) -> Tensor:
    """Return the gradient of class probabilities, for upstream gradients of the loss and of nll."""
    return target_gradient.of_logits(jobs.Upstream(loss, nll=nll), logits, unpack(args))


@operation(
    f"linear_target_gradient({LINEAR}, Tensor? loss, Tensor? nll, {SCHEMA}) -> Tensor",
    lambda *args: args[9].new_empty(args[9].shape),
)
def _linear_target_gradient(*args: Any) -> Tensor:
    return target_gradient.of_linear(jobs.Upstream(args[7], nll=args[8]), linear_of(args), unpack(args[9:]))


@operation(
    "scale_(Tensor(a!) grad, Tensor upstream, Tensor? deferred, str kernel) -> ()",
    lambda grad, upstream, deferred, kernel: None,
)
def _scale_(grad: Tensor, upstream: Tensor, deferred: Tensor | None, kernel: str) -> None:
    """Multiply a gradient in place by two 0-d factors of the accumulation dtype; rounds once."""
    jobs.scale(kernel, [grad], upstream, deferred, True)


@operation(
    "scaled(Tensor grad, Tensor upstream, Tensor? deferred, str kernel) -> Tensor",
    lambda grad, upstream, deferred, kernel: torch.empty_like(grad),
)
def _scaled(grad: Tensor, upstream: Tensor, deferred: Tensor | None, kernel: str) -> Tensor:
    """Return a gradient times two 0-d factors of the accumulation dtype; rounds once."""
    return jobs.scale(kernel, [grad], upstream, deferred, False)[0]


@operation(
    "weighed_sum(Tensor grad, Tensor values) -> Tensor",
    lambda grad, values: grad.new_empty((), dtype=accumulation_dtype(grad.dtype)),
)
def _weighed_sum(grad: Tensor, values: Tensor) -> Tensor:
    """Return sum(grad * values), 0-d."""
    return weighed_sum(grad, values)


@operation("second_derivative(Tensor upstream, Tensor like) -> Tensor", lambda upstream, like: torch.empty_like(like))
def _second_derivative(upstream: Tensor, like: Tensor) -> Tensor:
    """Raise for a second derivative: at once, or when a graph that contains this operation runs.

    AOT Autograd traces the backward pass of everything that requires a gradient, even if it is never executed.
    """
    raise RuntimeError(NO_SECOND)
