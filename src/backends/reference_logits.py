"""What the losses of the reference share: logits and their activation, reductions, and the gradients of a call."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xent.core.call import Activation, Given, Options, Source

__all__ = ["Array", "activated", "float64", "gradients", "raw", "reduced", "scaled"]

Array = NDArray[Any]


def float64(array: Any) -> Array:
    """Return an array in float64."""
    return np.asarray(array, np.float64)


def raw(source: Source) -> Array:
    """Return raw logits z (..., V)."""
    if isinstance(source, Given):
        return np.moveaxis(float64(source.logits), source.axis, -1)
    with np.errstate(invalid="ignore", over="ignore"):
        z: Array = float64(source.input) @ float64(source.weight).T
        return z if source.bias is None else z + float64(source.bias)


def activated(z: Array, activation: Activation) -> tuple[Array, Array]:
    """Return x = k tanh(s z / k), or s z, and dx/dz, without the temperature of rows."""
    scale, softcap = activation.logit_scale, activation.softcap
    x: Array = scale * z
    if softcap is None:
        return x, np.full_like(x, scale)
    tanh = np.tanh(x / softcap)
    return softcap * tanh, scale * (1 - tanh**2)


def reduced(values: Array, options: Options, divisor: Any, shape: tuple[int, ...]) -> Any:
    """Reduce values (N,) by the reduction of the call; 0 where the divisor of a mean is 0."""
    if options.reduction == "none":
        return values.reshape(shape)
    total = values.sum()
    if options.reduction == "sum":
        return total
    return total / divisor if divisor != 0 else np.float64(0.0)


def scaled(weights: Array, upstream: Any, options: Options, divisor: Any) -> Array:
    """Return the factor (N,) of the derivative of each row's loss: row weight, divisor and upstream gradient."""
    scale = weights * float64(upstream).reshape(-1)
    if options.reduction == "mean":
        scale = scale / divisor if divisor != 0 else scale * 0.0
    return np.asarray(scale)


def gradients(source: Source, grad: Array) -> dict[str, Array]:
    """Return the gradients by argument from that of raw logits (N, V): logits, or input, classifier and bias."""
    if isinstance(source, Given):
        shape = np.moveaxis(np.asarray(source.logits), source.axis, -1).shape
        return {"logits": np.moveaxis(grad.reshape(shape), -1, source.axis)}
    hidden, weight = float64(source.input), float64(source.weight)
    # Rows without a gradient contribute nothing, even if their hidden states are NaN.
    flat = np.where(grad.any(-1, keepdims=True), hidden.reshape(-1, weight.shape[1]), 0.0)
    return {
        "input": (grad @ weight).reshape(hidden.shape),
        "linear_weight": grad.T @ flat,
        "linear_bias": grad.sum(0),
    }
