"""The harness of the gradient checks for MLX: conversion of arrays, gradients, and the unfused computation."""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np

from xent.backends.mlx.devices import devices

__all__ = ["MlxHarness"]


class MlxHarness:
    """A `xent.backends.protocol.Harness` for one device.

    On NVIDIA GPUs MLX computes float32 products in TF32 unless this is turned off before the first product. Otherwise
    that rounding, which differs between products, would hide all other errors.
    """

    processes, seconds = 1, 0.1

    def __init__(self, device: str | None = None) -> None:
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
        self.device = device or devices()[0]
        self.dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16")[self.device != "cpu" :]
        self.kernels: tuple[str, ...] = ("MLX's own operations",)

    def watched(self) -> AbstractContextManager[set[str]]:
        """Report MLX's own operations, which compute the rows here."""
        return nullcontext(set(self.kernels))

    def sizes(self, dtype: str) -> dict[str, int]:
        """Return a size with several blocks of rows."""
        return {"several blocks": 100_003}

    def passed(self) -> None:
        """Do nothing: "auto" uses this backend without a check."""

    def array(self, values: Any, dtype: str | None = None) -> mx.array:
        """Return a NumPy array as an MLX array."""
        values = np.asarray(values)
        named = str(values.dtype)
        own = {"bool": "bool_", "complex128": "complex64"}.get(named, named)
        return mx.array(values, dtype=getattr(mx, dtype or own))

    def numpy(self, array: Any) -> Any:
        """Return an MLX array as a NumPy array, floats as float64."""
        if not mx.issubdtype(array.dtype, mx.floating):
            return np.array(array)
        return np.array(array if array.dtype == mx.float64 else array.astype(mx.float32)).astype(np.float64)

    def gradients(
        self, function: Callable[..., Any], inputs: tuple[mx.array, ...], upstream: Any
    ) -> tuple[Any, list[mx.array]]:
        """Return `function(*inputs)` and its gradients."""

        def total(*arrays: mx.array) -> tuple[mx.array, Any]:
            results = function(*arrays)
            if not isinstance(results, tuple):
                return (results if upstream is None else results * upstream).sum(), results
            given = zip(results, upstream, strict=True)
            return sum((result * grad).sum() for result, grad in given if grad is not None), results

        with mx.stream(getattr(mx, self.device)):
            (_, results), made = mx.value_and_grad(total, argnums=tuple(range(len(inputs))))(*inputs)
            gradients = [made] if isinstance(made, mx.array) else list(made)  # for one input MLX returns no tuple
            mx.eval(results, gradients)
        return results, gradients

    def linear(self, input: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        """Return the logits of the unfused computation."""
        if 0 in input.shape:  # on NVIDIA GPUs MLX crashes for an empty product
            return mx.zeros((*input.shape[:-1], weight.shape[0]), input.dtype)
        return input @ weight.T if bias is None else mx.addmm(bias, input, weight.T)

    def unfused_divergence(
        self,
        logits: mx.array,
        *,
        teacher: mx.array | None = None,
        ids: mx.array | None = None,
        log_probs: mx.array | None = None,
        tail: str = "",
        kind: str = "kl",
        beta: float = 0.0,
        temperature: float = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        teacher_scale: float = 1.0,
        reduction: str = "mean",
        sample_weight: mx.array | None = None,
        normalizer: Any = None,
    ) -> mx.array:
        """Compute a divergence in float32 (float64 for float64), directly by its formula."""
        if not logits.size:  # on NVIDIA GPUs some operations of MLX crash for empty arrays
            found = logits.sum().astype(mx.float64 if logits.dtype == mx.float64 else mx.float32)
            return logits.sum(-1).astype(found.dtype) if reduction == "none" else found
        log_p = _log_probs(logits, softcap, logit_scale, temperature)
        if teacher is not None:
            rows = _between(log_p, _log_probs(teacher, teacher_softcap, teacher_scale, temperature), kind, beta)
        else:
            assert ids is not None
            assert log_probs is not None
            rows = _from_top_k(log_p, ids, log_probs.astype(log_p.dtype), tail, kind)
        a = mx.ones_like(rows) if sample_weight is None else sample_weight.astype(rows.dtype)
        return _reduced(rows, a, a, reduction, normalizer)

    def unfused_loss(
        self,
        logits: mx.array,
        target: mx.array,
        *,
        weight: mx.array | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        sample_weight: mx.array | None = None,
        normalizer: Any = None,
    ) -> mx.array:
        """Compute the loss in float32 (float64 for float64), as careful training scripts do."""
        x = _activated(logits, softcap, logit_scale)
        wide, vocabulary = x.dtype, x.shape[-1]
        x = x.reshape(int(np.prod(x.shape[:-1])), vocabulary)
        w = mx.ones((vocabulary,), wide) if weight is None else weight.astype(wide)
        lse = mx.logsumexp(x, axis=-1, keepdims=True) if x.size else x.sum(-1, keepdims=True)
        log_p = x - lse
        if mx.issubdtype(target.dtype, mx.floating):
            given = target.reshape(x.shape).astype(wide)
            share = w * ((1 - label_smoothing) * given + label_smoothing / vocabulary)
            rows = -(share * log_p).sum(-1)
            ignored, row_weight = mx.zeros((len(x),), mx.bool_), mx.ones((len(x),), wide)
        else:
            flat = target.reshape(-1).astype(mx.int64)
            ignored = flat == ignore_index
            flat = mx.where(ignored, 0, flat)
            row_weight = w[flat]
            rows = -(1 - label_smoothing) * row_weight * mx.take_along_axis(log_p, flat[:, None], -1)[:, 0]
            if label_smoothing:
                rows = rows - label_smoothing / vocabulary * (w * log_p).sum(-1)
        rows = rows + z_loss * mx.square(lse[:, 0])
        a = mx.ones((len(x),), wide) if sample_weight is None else sample_weight.reshape(-1).astype(wide)
        a = mx.where(ignored, 0, a)
        found = _reduced(rows, a, a * row_weight, reduction, normalizer)
        return found.reshape(logits.shape[:-1]) if reduction == "none" else found

    def unfused_rows(
        self,
        logits: mx.array,
        target: mx.array,
        ignored: mx.array,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: mx.array | None = None,
        allowed: mx.array | None = None,
    ) -> dict[str, mx.array]:
        """Compute lse, nll and entropy in float32 (float64 for float64), as trainers do."""
        x = _activated(logits, softcap, logit_scale)
        if temperature is not None:
            x = x / temperature[..., None]
        if allowed is not None:
            x = mx.where(allowed, x, -mx.inf)
        lse = mx.logsumexp(x, axis=-1, keepdims=True) if x.size else x.sum(-1, keepdims=True)
        log_p = x - lse
        finite = mx.where(log_p == -mx.inf, 0, log_p)
        if mx.issubdtype(target.dtype, mx.floating):
            nll = -(target * finite).sum(-1)
        else:
            nll = -mx.take_along_axis(log_p, target[..., None], -1)[..., 0]
            nll = mx.where(nll == mx.inf, mx.inf, nll)  # a constant: no gradient
        rows = {"lse": lse[..., 0], "nll": nll, "entropy": -(mx.exp(log_p) * finite).sum(-1)}
        return {name: mx.where(ignored, 0, row) for name, row in rows.items()}


def _reduced(rows: mx.array, a: mx.array, parts: mx.array, reduction: str, normalizer: Any) -> mx.array:
    """Reduce rows with weights `a`. Without a normalizer, the mean divides by the sum of `parts`."""
    rows = mx.where(a == 0, 0, a * rows)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    divisor = parts.sum() if normalizer is None else normalizer
    return rows.sum() / divisor if float(divisor) else rows.sum() * 0


def _activated(z: mx.array, softcap: float | None, scale: float) -> mx.array:
    x = z.astype(mx.float64 if z.dtype == mx.float64 else mx.float32) * scale
    return x if softcap is None else softcap * mx.tanh(x / softcap)


def _log_probs(z: mx.array, softcap: float | None, scale: float, temperature: float) -> mx.array:
    x = _activated(z, softcap, scale) / temperature
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def _between(log_p: mx.array, log_q: mx.array, kind: str, beta: float) -> mx.array:
    if kind == "tv":
        return mx.abs(mx.exp(log_p) - mx.exp(log_q)).sum(-1) / 2
    if beta == 0:
        return (mx.exp(log_q) * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (mx.exp(log_p) * (log_p - log_q)).sum(-1)
    log_m = mx.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    forward = (mx.exp(log_q) * (log_q - log_m)).sum(-1)
    return beta * forward + (1 - beta) * (mx.exp(log_p) * (log_p - log_m)).sum(-1)


def _from_top_k(log_p: mx.array, ids: mx.array, log_q: mx.array, tail: str, kind: str) -> mx.array:
    known = log_q != -mx.inf
    if tail == "renormalize":
        log_q = log_q - mx.logsumexp(log_q, axis=-1, keepdims=True)
    q = mx.exp(log_q)
    rows = (q * (mx.where(known, log_q, 0) - mx.take_along_axis(log_p, ids, -1))).sum(-1)
    if tail != "bucket" and kind == "kl":
        return rows
    counts = mx.zeros_like(log_p)
    classes = mx.arange(log_p.shape[-1])
    for k in range(ids.shape[-1]):
        counts = counts + ((ids[..., k : k + 1] == classes) & known[..., k : k + 1])
    p_left = mx.where(counts > 0, 0, mx.exp(log_p)).sum(-1)
    mass = mx.maximum(1 - q.sum(-1), 0)
    if kind == "tv":
        apart = mx.where(known, mx.exp(mx.take_along_axis(log_p, ids, -1)), 0) - q
        return (mx.abs(apart).sum(-1) + mx.abs(p_left - (mass if tail == "bucket" else 0))) / 2
    some = (mass > 0) & (p_left > 0)
    return rows + mx.where(some, mass * (mx.log(mx.maximum(mass, 1e-30)) - mx.log(mx.where(some, p_left, 1))), 0)
