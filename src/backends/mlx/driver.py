"""The entry of the MLX driver: move classes to the last axis, run the rows, return results in the caller's shapes."""

import mlx.core as mx

from xent.backends.mlx import empty, linear, logits, results
from xent.backends.mlx.autograd import guarded
from xent.backends.mlx.classifier import check_dtypes
from xent.backends.mlx.facts import gather_facts, is_float
from xent.backends.mlx.kernels import KERNELS
from xent.backends.mlx.supported import Supported
from xent.backends.mlx.tracing import is_differentiated
from xent.core.spec import LinearCall, LogitsCall, Stats

__all__ = ["run"]


def run(call: LogitsCall | LinearCall, kernel: str) -> tuple[mx.array, Stats]:
    """Run a call with the row kernel of that backend; KeyError if none is registered."""
    chosen = KERNELS[kernel]
    if isinstance(call, LogitsCall):
        given = {"logits": mx.moveaxis(call.logits, call.axis, -1)}
        shape = given["logits"].shape[:-1]
    else:
        check_dtypes(call.input, call.linear_weight, call.linear_bias)
        given, shape = linear.differentiable(call), call.input.shape[:-1]
    probabilities = None
    if is_float(call.target):
        probabilities = mx.moveaxis(call.target, call.axis if isinstance(call, LogitsCall) else -1, -1)
    if 0 in shape:
        trained = [*given.values(), *([] if probabilities is None else [probabilities])]
        return empty.run(trained, call.loss, shape)
    call = guarded(call)
    rows: logits.Logits | linear.Chunks
    if isinstance(call, LogitsCall):
        values = mx.moveaxis(call.logits, call.axis, -1)
        target = mx.moveaxis(call.target, call.axis, -1) if is_float(call.target) else call.target
        facts = gather_facts(call, target, values.shape[-1], values.dtype)
        rows = logits.Logits(values, facts, chosen)
    else:
        facts = gather_facts(call, call.target, call.linear_weight.shape[0], call.input.dtype)
        rows = linear.Chunks(call, facts, chosen, "weight" in given and is_differentiated(given["weight"]))
    served = rows if facts.support is None else Supported(rows, facts)
    return results.run(given, probabilities, served, facts, shape)
