"""Custom operations on shards, for torch.compile and modes. The collectives are inside, so tracers do not see them.

A compiled graph calls them in the same order on all ranks, as it does with functional collectives. A group is passed by
its name in PyTorch's table of groups.
"""

import math
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.facts import accumulation_dtype
from xent.backends.torch.job import Upstream
from xent.backends.torch.logits import makes_gradient_first
from xent.backends.torch.ops import LINEAR, UPSTREAM, fake_gradients, fake_results, linear_of, operation
from xent.backends.torch.options import SCHEMA, reduction_of, stats_of, unpack
from xent.backends.torch.rows import gradient_like
from xent.backends.torch.sharded.calls import (
    WHERE,
    Where,
    linear_backward,
    linear_forward,
    logits_backward,
    logits_forward,
)
from xent.backends.torch.sharded.finish import kept_names

__all__: list[str] = []

_OF_WHERE = len(Where._fields)


def _split(args: tuple[Any, ...]) -> tuple[Where, Any]:
    return Where(*args[:_OF_WHERE]), args[_OF_WHERE:]


def _fake_kept(like: Tensor, count: int, dtype: torch.dtype, options: Any) -> Tensor:
    target, weight = options[:2]
    names = kept_names(stats_of(options), target.is_floating_point(), weight is not None)
    return like.new_empty((len(names), count), dtype=accumulation_dtype(dtype))


def _fake_cross_entropy(logits: Tensor, needs_grad: bool, *args: Any) -> Any:
    _, options = _split(args)
    acc = accumulation_dtype(logits.dtype)
    loss, _, stats = fake_results(logits.shape[:-1], acc, logits.device, options)
    if not needs_grad:
        return loss, logits.new_empty(0), stats
    if makes_gradient_first(reduction_of(options), logits.dtype):
        return loss, gradient_like(logits), stats
    return loss, _fake_kept(logits, math.prod(logits.shape[:-1]), logits.dtype, options), stats


@operation(
    f"sharded_cross_entropy(Tensor logits, bool needs_grad, {WHERE}, {SCHEMA}) -> "
    "(Tensor loss, Tensor kept, Tensor[] stats)",
    _fake_cross_entropy,
)
def _cross_entropy(logits: Tensor, needs_grad: bool, *args: Any) -> Any:
    where, rest = _split(args)
    options = unpack(rest)
    first = needs_grad and makes_gradient_first(options.spec.reduction, logits.dtype)
    grad = gradient_like(logits) if first else None
    loss, kept, stats = logits_forward(logits, grad, needs_grad and not first, where, options)
    kept = kept if grad is None else grad
    return loss, logits.new_empty(0) if kept is None else kept, stats


@operation(
    f"sharded_cross_entropy_backward(Tensor logits, Tensor kept, {UPSTREAM}, {WHERE}, {SCHEMA}) -> Tensor",
    lambda logits, *args: gradient_like(logits),
)
def _cross_entropy_backward(logits: Tensor, kept: Tensor, *args: Any) -> Tensor:
    where, rest = _split(args[4:])
    return logits_backward(Upstream(*args[:4]), logits, kept, where, unpack(rest), False)


def _fake_linear(*args: Any) -> Any:
    linear, options = linear_of(args), _split(args[7:])[1]
    target = options[0]
    rows = target.shape[:-1] if target.is_floating_point() else target.shape
    acc, each_row = accumulation_dtype(linear.compute), reduction_of(options) == "none"
    loss, deferred, stats = fake_results(rows, acc, linear.input.device, options)
    keeps = each_row and any(linear.needs)
    kept = _fake_kept(loss, math.prod(rows), linear.compute, options) if keeps else loss.new_empty(0)
    return loss, deferred, fake_gradients(linear, not each_row), kept, stats


@operation(
    f"sharded_linear_cross_entropy({LINEAR}, {WHERE}, {SCHEMA}) -> "
    "(Tensor loss, Tensor deferred, Tensor[] gradients, Tensor kept, Tensor[] stats)",
    _fake_linear,
)
def _linear_cross_entropy(*args: Any) -> Any:
    linear, (where, rest) = linear_of(args), _split(args[7:])
    options = unpack(rest)
    keeps = any(linear.needs) and options.spec.reduction == "none"
    loss, deferred, kept, gradients, stats = linear_forward(linear, keeps, where, options)
    deferred = loss.new_ones(()) if deferred is None else deferred
    return loss, deferred, gradients, loss.new_empty(0) if kept is None else kept, stats


@operation(
    f"sharded_linear_cross_entropy_backward({LINEAR}, Tensor kept, {UPSTREAM}, {WHERE}, {SCHEMA}) -> Tensor[]",
    lambda *args: fake_gradients(linear_of(args), True),
)
def _linear_cross_entropy_backward(*args: Any) -> list[Tensor]:
    where, rest = _split(args[12:])
    return linear_backward(Upstream(*args[8:12]), linear_of(args), args[7], where, unpack(rest))
