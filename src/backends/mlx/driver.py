"""From a call to MLX's graph and back: classes on the last axis, results in the caller's shapes."""

from typing import Any

import mlx.core as mx

from xent.backends.mlx import empty, linear, logits
from xent.backends.mlx.facts import gather_facts, is_float
from xent.backends.mlx.kernels import kernels
from xent.backends.mlx.results import stats_of
from xent.core.spec import LinearCall, LogitsCall, QuantizedWeight, Stats

__all__ = ["run"]


def run(call: LogitsCall | LinearCall, kernel: str) -> tuple[mx.array, Stats]:
    """Run a call with the row kernel of that name."""
    chosen = kernels(kernel)
    if isinstance(call, LogitsCall):
        values = mx.moveaxis(call.logits, call.axis, -1)
        target = mx.moveaxis(call.target, call.axis, -1) if is_float(call.target) else call.target
        shape = values.shape[:-1]
        if 0 in shape:
            return empty.run([call.logits], call.loss, shape)
        facts = gather_facts(call, target, values.shape[-1], values.dtype)
        loss, found = logits.run(values, facts, chosen)
    else:
        _check_dtypes(call)
        shape = call.input.shape[:-1]
        if 0 in shape:
            return empty.run([*linear.differentiable(call).values()], call.loss, shape)
        facts = gather_facts(call, call.target, call.linear_weight.shape[0], call.input.dtype)
        loss, found = linear.run(call, facts, chosen)
    return loss.reshape(shape) if call.loss.reduction == "none" else loss, stats_of(found, facts, shape)


def _check_dtypes(call: LinearCall) -> None:
    """Raise TypeError where MLX would promote: a product in float32 costs what nobody asked for."""
    arrays: dict[str, Any] = {"linear_weight": call.linear_weight, "linear_bias": call.linear_bias}
    if isinstance(call.linear_weight, QuantizedWeight):
        del arrays["linear_weight"]
    for name, array in arrays.items():
        if array is not None and array.dtype != call.input.dtype:
            raise TypeError(f"{name} must have the dtype of input, {call.input.dtype}; got {array.dtype}")
