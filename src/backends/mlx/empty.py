"""A call of no rows, computed without operations on empty arrays: on NVIDIA GPUs some of them crash in MLX."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from xent.backends.mlx.autograd import with_gradients
from xent.backends.mlx.facts import accumulation_dtype
from xent.core.spec import LossSpec, Stats

__all__ = ["run"]


def run(inputs: Sequence[mx.array], spec: LossSpec, shape: tuple[int, ...]) -> tuple[mx.array, Stats]:
    """Return the loss of rows of an empty `shape`, with gradients of 0 for `inputs`, and the statistics."""
    acc = accumulation_dtype(inputs[0].dtype)

    def rows(dtype: mx.Dtype = acc) -> mx.array:
        return _filled(shape, dtype)

    def number(dtype: mx.Dtype = acc) -> mx.array:
        return _filled((), dtype)

    reduced = rows if spec.reduction == "none" else number
    made: dict[str, Callable[[], mx.array]] = {
        "lse": rows,
        "nll": rows,
        "entropy": rows,
        "predictions": lambda: rows(mx.int32),
        "log_sum_sq_probs": rows,
        "mean_logit": rows,
        "z_loss": reduced,
        "accuracy": rows if spec.accuracy_of_rows else number,
        "count": lambda: number(mx.int32),
    }
    zeros = [_filled(array.shape, array.dtype) for array in inputs]
    loss = with_gradients({"loss": reduced()}, inputs, lambda _: zeros)["loss"]
    return loss, Stats(**{name: made[name]() for name in spec.stats})


def _filled(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return a new array of zeros at each call: mx.compile fails if two results are the same array."""
    if shape and all(shape):
        return mx.zeros(shape, dtype)
    return mx.array([] if shape else [0], dtype).reshape(shape)
