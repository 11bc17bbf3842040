"""The harness of the gradient checks for MLX: conversion of arrays, gradients, and the unfused computation."""

import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from xent.command.check.harness import Harness

__all__ = ["MlxHarness"]


class MlxHarness(Harness[mx.array]):
    """The harness for one device.

    On NVIDIA GPUs MLX computes float32 products in TF32 unless this is turned off before the first product. Otherwise
    that rounding, which differs between products, would hide all other errors.
    """

    ops, seconds = mx, 0.1

    def __init__(self, device: str) -> None:
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
        self.device = device
        self.dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16")[self.device != "cpu" :]
        self.kernels: tuple[str, ...] = ("MLX's own operations",)

    def array(self, data: ArrayLike, dtype: str | None = None) -> mx.array:
        """Return a NumPy array as an MLX array."""
        data = np.asarray(data)
        named = str(data.dtype)
        own = {"bool": "bool_", "complex128": "complex64"}.get(named, named)
        return mx.array(data, dtype=getattr(mx, dtype or own))

    def numpy(self, array: mx.array) -> NDArray[Any]:
        """Return an MLX array as a NumPy array, floats as float64."""
        return np.array(self.cast(array, None)).astype(np.float64) if self.is_float(array) else np.array(array)

    def gradients(
        self, function: Callable[..., Any], inputs: tuple[mx.array, ...], upstream: Any
    ) -> tuple[Any, list[mx.array]]:
        """Return `function(*inputs)` and its gradients."""

        def total(*arrays: mx.array) -> tuple[mx.array, Any]:
            results = function(*arrays)
            if not isinstance(results, tuple):
                return (results if upstream is None else results * upstream).sum(), results
            pairs = zip(results, upstream, strict=True)
            return sum((result * grad).sum() for result, grad in pairs if grad is not None), results

        with mx.stream(getattr(mx, self.device)):
            (_, results), grads = mx.value_and_grad(total, argnums=tuple(range(len(inputs))))(*inputs)
            gradients = [grads] if isinstance(grads, mx.array) else list(grads)  # for one input MLX returns no tuple
            mx.eval(results, gradients)
        return results, gradients

    def linear(self, input: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        """Return the logits of the unfused computation."""
        if 0 in input.shape:  # on NVIDIA GPUs MLX crashes for an empty product
            return mx.zeros((*input.shape[:-1], weight.shape[0]), input.dtype)
        return input @ weight.T if bias is None else mx.addmm(bias, input, weight.T)

    def cast(self, array: mx.array, dtype: mx.Dtype | None) -> mx.array:
        """Return an array as another dtype."""
        return array.astype(dtype or (mx.float64 if array.dtype == mx.float64 else mx.float32))

    def is_float(self, array: mx.array) -> bool:
        """Whether an array has a float dtype."""
        return mx.issubdtype(array.dtype, mx.floating)

    def picked(self, array: mx.array, ids: mx.array) -> mx.array:
        """Return the values at some ids."""
        return mx.take_along_axis(array, ids, -1)

    def log_softmax(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return the normalizer, and x minus it. On NVIDIA GPUs some operations of MLX crash for empty arrays."""
        lse = mx.logsumexp(x, axis=-1, keepdims=True) if x.size else x.sum(-1, keepdims=True)
        return lse[..., 0], x - lse

    def row_losses(
        self, x: mx.array, target: mx.array, weight: mx.array | None, ignored: mx.array, smoothing: float
    ) -> mx.array:
        """Return the cross entropy of rows."""
        _, log_p = self.log_softmax(x)
        w = mx.ones((x.shape[-1],), x.dtype) if weight is None else weight
        if self.is_float(target):
            return -(w * ((1 - smoothing) * target + smoothing / len(w)) * log_p).sum(-1)
        rows = -(1 - smoothing) * w[target] * self.picked(log_p, target[:, None])[:, 0]
        return rows - smoothing / len(w) * (w * log_p).sum(-1) if smoothing else rows
