"""The custom operations: what torch.compile, autocast and meta tensors see of xent. Opaque, without autograd.

Autograd is added around them in `autograd`, by torch.autograd.Function rather than torch.library.register_autograd:
that one does not work under torch.func, and cannot reuse the logits' memory. Each operation has a fake twin below it
that gives shapes and dtypes alone.

An operation returns `kept`, what its backward needs: the gradient itself for the reductions "mean" and "sum" (empty
where nobody asked for one), the (2, N) norm for "none"; and `deferred`, the factor that a kept gradient still lacks.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import linear as linear_driver
from xent.backends.torch import logits as logits_driver
from xent.backends.torch.facts import Facts, accumulation_dtype
from xent.backends.torch.kernels import kernels
from xent.backends.torch.linear import Linear
from xent.backends.torch.options import SCHEMA, Options
from xent.backends.torch.product_sum import kept_dtype
from xent.backends.torch.results import Results
from xent.backends.torch.rows import gradient_like

__all__: list[str] = []

_LIBRARY = torch.library.Library("xent", "DEF")
_LINEAR = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, bool[] needs, int shift, int? workspace, "
    "ScalarType compute"
)


def _operation(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as an operation of every device, and `fake` for shapes."""
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def without_autocast(*args: Any) -> Any:
            device = args[0].device
            # Triton launches on the current device, PyTorch on that of its tensors.
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return without_autocast(*args)
            if not (torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)):
                return function(*args)
            with torch.autocast(device.type, enabled=False):
                return function(*args)

        _LIBRARY.define(schema)
        _LIBRARY.impl(name, without_autocast, "CompositeExplicitAutograd")
        torch.library.register_fake(f"xent::{name}", fake, lib=_LIBRARY)
        return function

    return register


def _fake_results(shape: torch.Size, acc: torch.dtype, device: torch.device, options: Options) -> Any:
    """Return (loss, deferred, stats) without values; per-row results are flat.

    Sizes may be symbols, which `math.prod` keeps; `shape.numel()` would fix their values and compile anew for each.
    """
    count = math.prod(shape)

    def one(names_rows: bool, dtype: torch.dtype = acc) -> Tensor:
        return torch.empty((count,) if names_rows else (), dtype=dtype, device=device)

    each_row = options.reduction == "none"
    makers = {
        "lse": lambda: one(True),
        "nll": lambda: one(True),
        "entropy": lambda: one(True),
        "predictions": lambda: one(True, torch.int64),
        "z_loss": lambda: one(each_row),
        "accuracy": lambda: one(False),
        "count": lambda: one(False, torch.int64),
    }
    return one(each_row), one(False), [makers[name]() for name in options.stats]


def _finished(options: Options, facts: Facts, results: Results) -> tuple[Tensor, Tensor, list[Tensor]]:
    reduced = kernels(options.kernel).reduced
    return reduced(results.loss, facts), facts.deferred, results.stats(facts, reduced)


def _fake_cross_entropy(logits: Tensor, needs_grad: bool, *args: Any) -> Any:
    options = Options(*args)
    acc, shape = accumulation_dtype(logits.dtype), logits.shape[:-1]
    loss, deferred, stats = _fake_results(shape, acc, logits.device, options)
    if not needs_grad:
        kept = logits.new_empty(0)
    elif options.reduction == "none":
        kept = logits.new_empty((2, math.prod(shape)), dtype=acc)
    else:
        kept = gradient_like(logits)
    return loss, kept, deferred, stats


@_operation(
    f"cross_entropy(Tensor logits, bool needs_grad, {SCHEMA}) -> (Tensor loss, Tensor kept, Tensor deferred, Tensor[])",
    _fake_cross_entropy,
)
def _cross_entropy(logits: Tensor, needs_grad: bool, *args: Any) -> Any:
    options = Options(*args)
    each_row = options.reduction == "none"
    grad = gradient_like(logits) if needs_grad and not each_row else None
    facts, results = logits_driver.forward(logits, grad, options, keep_norm=needs_grad and each_row)
    loss, deferred, stats = _finished(options, facts, results)
    kept = grad if grad is not None else results.norm
    return loss, logits.new_empty(0) if kept is None else kept, deferred, stats


def _fake_cross_entropy_(logits: Tensor, *args: Any) -> Any:
    return _fake_results(logits.shape[:-1], accumulation_dtype(logits.dtype), logits.device, Options(*args))


@_operation(
    f"cross_entropy_(Tensor(a!) logits, {SCHEMA}) -> (Tensor loss, Tensor deferred, Tensor[])", _fake_cross_entropy_
)
def _cross_entropy_(logits: Tensor, *args: Any) -> Any:
    """Overwrite the logits with their gradient; "mean" and "sum" only."""
    options = Options(*args)
    facts, results = logits_driver.forward(logits, logits, options, keep_norm=False)
    torch.autograd.graph.increment_version(logits)
    return _finished(options, facts, results)


@_operation(
    f"cross_entropy_backward(Tensor upstream, Tensor logits, Tensor norm, {SCHEMA}) -> Tensor",
    lambda upstream, logits, norm, *args: gradient_like(logits),
)
def _cross_entropy_backward(upstream: Tensor, logits: Tensor, norm: Tensor, *args: Any) -> Tensor:
    grad = gradient_like(logits)
    logits_driver.backward(upstream, logits, grad, norm, Options(*args))
    return grad


@_operation(
    f"cross_entropy_backward_(Tensor upstream, Tensor(a!) logits, Tensor norm, {SCHEMA}) -> ()",
    lambda upstream, logits, norm, *args: None,
)
def _cross_entropy_backward_(upstream: Tensor, logits: Tensor, norm: Tensor, *args: Any) -> None:
    """Overwrite the logits with their gradient."""
    logits_driver.backward(upstream, logits, logits, norm, Options(*args))
    torch.autograd.graph.increment_version(logits)


def _fake_gradients(linear: Linear, wanted: bool) -> list[Tensor]:
    sources = (linear.input, linear.weight, linear.bias)
    return [
        source.new_empty(source.shape, dtype=kept_dtype(source.dtype))
        if source is not None and wanted and need
        else (linear.weight if source is None else source).new_empty(0)
        for source, need in zip(sources, linear.needs, strict=True)
    ]


def _split(args: tuple[Any, ...]) -> tuple[Linear, Options]:
    source, weight, bias, needs, shift, workspace, compute, *options = args
    return Linear(source, weight, bias, shift, workspace, compute, tuple(needs)), Options(*options)


def _fake_linear(*args: Any) -> Any:
    linear, options = _split(args)
    acc, shape = accumulation_dtype(linear.compute), linear.input.shape[:-1]
    loss, deferred, stats = _fake_results(shape, acc, linear.input.device, options)
    each_row = options.reduction == "none" and any(linear.needs)
    norm = linear.input.new_empty((2, math.prod(shape)) if each_row else 0, dtype=acc)
    return loss, norm, deferred, _fake_gradients(linear, not each_row), stats


@_operation(
    f"linear_cross_entropy({_LINEAR}, {SCHEMA}) -> "
    "(Tensor loss, Tensor norm, Tensor deferred, Tensor[] gradients, Tensor[] stats)",
    _fake_linear,
)
def _linear_cross_entropy(*args: Any) -> Any:
    linear, options = _split(args)
    keep_norm = options.reduction == "none" and any(linear.needs)
    facts, results, gradients = linear_driver.forward(linear, options, keep_norm)
    loss, deferred, stats = _finished(options, facts, results)
    norm = results.loss.new_empty(0) if results.norm is None else results.norm
    return loss, norm, deferred, gradients, stats


@_operation(
    f"linear_cross_entropy_backward(Tensor upstream, Tensor norm, {_LINEAR}, {SCHEMA}) -> Tensor[]",
    lambda upstream, norm, *args: _fake_gradients(_split(args)[0], True),
)
def _linear_cross_entropy_backward(upstream: Tensor, norm: Tensor, *args: Any) -> list[Tensor]:
    linear, options = _split(args)
    return linear_driver.backward(upstream, linear, norm, options)


@_operation(
    "scale_(Tensor(a!) grad, Tensor upstream, Tensor deferred, str kernel) -> ()",
    lambda grad, upstream, deferred, kernel: None,
)
def _scale_(grad: Tensor, upstream: Tensor, deferred: Tensor, kernel: str) -> None:
    """Multiply a gradient in place by two 0-d factors of the accumulation dtype; rounds once."""
    kernels(kernel).scale_(grad, upstream, deferred)
