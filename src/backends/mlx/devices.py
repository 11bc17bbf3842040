"""MLX's devices, and functions that are accurate on all of them. Operations run on the current default device."""

import math
import re
from functools import cache
from importlib import metadata

import mlx.core as mx

__all__ = [
    "accumulation_dtype",
    "chunk_device",
    "class_sum",
    "device_type",
    "exact_exp",
    "exp",
    "expm1",
    "has_fused_loss",
    "product",
    "scalar",
    "version",
]

_TOGETHER = 16  # values of a node of the tree that adds more classes


@cache
def version() -> str:
    """Return MLX's version."""
    return metadata.version("mlx")


def device_type() -> str:
    """Return "cpu" or "gpu"."""
    return "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"


def chunk_device() -> str:
    """Return "mlx-cpu", "metal" or "mlx-cuda", the device names of `xent.core.chunks`."""
    if device_type() == "cpu":
        return "mlx-cpu"
    return "metal" if mx.metal.is_available() else "mlx-cuda"


def has_fused_loss() -> bool:
    """Whether `mlx.core.fast.cross_entropy` is one kernel on this device. Elsewhere it rounds to the logits' dtype."""
    if device_type() == "cpu":
        return False
    number = tuple(map(int, re.findall(r"\d+", version())[:3]))
    return number >= ((0, 32, 4) if mx.metal.is_available() else (0, 32, 2))


def accumulation_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype of sums, of per-row results and of the loss."""
    return mx.float64 if dtype == mx.float64 else mx.float32


def scalar(value: mx.array | float, dtype: mx.Dtype) -> mx.array:
    """Return a number or a 0-d array as a 0-d array of `dtype`."""
    return value.astype(dtype) if isinstance(value, mx.array) else mx.array(float(value), dtype=dtype)


def exp(x: mx.array) -> mx.array:
    """Return exp(x). MLX's own has only float32 precision, also for float64."""
    return mx.power(mx.array(math.e, dtype=mx.float64), x) if x.dtype == mx.float64 else mx.exp(x)


def expm1(x: mx.array) -> mx.array:
    """Return exp(x) - 1."""
    return exp(x) - 1 if x.dtype == mx.float64 else mx.expm1(x)


def exact_exp(x: mx.array) -> mx.array:
    """Return exp(x) for x <= 0. On the CPU MLX's own has an error of up to 14 units in the last place far from 0."""
    if x.dtype == mx.float64 or device_type() != "cpu":
        return exp(x)
    near = mx.maximum(x, -100)
    whole = mx.round(near * (1 / math.log(2)))
    # ln 2 is split in two parts; the first has few bits, so that the product with it is exact.
    rest = near - whole * 0.693359375 + whole * 2.12194440e-4
    return mx.where(x < -87, 0, (1 + mx.expm1(rest)) * mx.power(mx.array(2.0, mx.float32), whole))


def class_sum(array: mx.array) -> mx.array:
    """Return the sum over the last axis. On a CPU sum a tree, because MLX's sequential sum loses precision."""
    while device_type() == "cpu" and (count := array.shape[-1]) > _TOGETHER:
        whole = count // _TOGETHER * _TOGETHER
        parts = array[..., :whole].reshape(*array.shape[:-1], -1, _TOGETHER).sum(-1)
        array = parts if whole == count else mx.concatenate([parts, array[..., whole:].sum(-1, keepdims=True)], -1)
    return array.sum(-1)


def product(weights: mx.array, array: mx.array) -> mx.array:
    """Return weights * array; 0 for a weight of 0, also if the element is infinite."""
    return mx.where(weights == 0, 0, weights * array)
