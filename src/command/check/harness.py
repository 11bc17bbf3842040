"""What the gradient checks use of a framework, and the unfused computations that xent is compared with."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Harness", "Operand"]

Array = TypeVar("Array")
Operand = Any
"""An array of the framework, with the operations and methods that PyTorch's and MLX's arrays share."""


class Harness(Generic[Array]):
    """What the gradient checks (`python -m xent check`, tests/) use of a framework: one subclass for each.

    `unfused_loss`, `unfused_divergence` and `unfused_rows` compute with the framework's own differentiable operations,
    in float32, or in float64 for float64. Their rounding error is what xent's error is compared with. They use no code
    of xent.
    """

    ops: Any
    """The framework's module. PyTorch and MLX have the same names for the operations here."""
    device: str
    dtypes: tuple[str, ...]
    """Names of the float dtypes to check, widest first."""
    processes: int = 1
    """In how many processes the cases run: several where most of the time goes into compiling on the host."""
    seconds: float
    """About how long a process takes for a case of `python -m xent check`, which it says at the start."""
    kernels: tuple[str, ...]
    """The names of the device's kernels, or a description of the framework's own operations."""

    def watched(self) -> AbstractContextManager[set[str]]:
        """Return a context that collects the names of the kernels that run in it. Each starts with one of `kernels`."""
        return nullcontext(set(self.kernels))

    def sizes(self, dtype: str) -> dict[str, int]:
        """Return numbers of classes, by their reason, that reach every kernel and loop of the device."""
        return {"several blocks": 100_003}

    def passed(self) -> None:
        """Record that every case of a full check has passed on this device, where "auto" depends on it."""

    def array(self, data: ArrayLike, dtype: str | None = None) -> Array:
        """Return a NumPy array as the framework's array on the device, as `dtype` if given."""
        raise NotImplementedError

    def numpy(self, array: Array) -> NDArray[Any]:
        """Return a framework's array as a NumPy array, floats as float64."""
        raise NotImplementedError

    def gradients(
        self, function: Callable[..., Any], inputs: tuple[Array, ...], upstream: Operand
    ) -> tuple[Operand, list[Array]]:
        """Return `function(*inputs)` and its gradients with respect to `inputs`, for `upstream` (None: ones).

        If the function returns a tuple, `upstream` is a tuple too, with None for results without upstream gradient.
        """
        raise NotImplementedError

    def linear(self, input: Array, weight: Array, bias: Array | None) -> Array:
        """Return the logits (..., V) of the unfused computation."""
        raise NotImplementedError

    def cast(self, array: Operand, dtype: Any) -> Operand:
        """Return an array as another dtype of the framework; None for float32, or float64 if it is that."""
        raise NotImplementedError

    def is_float(self, array: Operand) -> bool:
        """Whether an array has a float dtype."""
        raise NotImplementedError

    def picked(self, array: Operand, ids: Operand) -> Operand:
        """Return the elements of an array (..., V) at integer ids (..., K)."""
        raise NotImplementedError

    def log_softmax(self, x: Operand) -> tuple[Operand, Operand]:
        """Return the logarithm of the sum of exponentials (...) of x (..., V), and x minus it."""
        raise NotImplementedError

    def row_losses(self, x: Operand, target: Operand, weight: Operand, ignored: Operand, smoothing: float) -> Operand:
        """Return the cross entropy (N,) of x (N, V), with class weights; any value in `ignored` rows."""
        raise NotImplementedError

    def unfused_loss(
        self,
        logits: Array,
        target: Array,
        *,
        weight: Array | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        sample_weight: Array | None = None,
        normalizer: Operand = None,
    ) -> Array:
        """Compute the loss from (..., V) logits, as careful training scripts do."""
        x, y, class_weight = self._activated(logits, softcap, logit_scale), cast(Operand, target), cast(Operand, weight)
        shape = x.shape[:-1]
        x = x.reshape(math.prod(shape), x.shape[-1])
        ones = self.ops.ones_like(x[:, 0])
        class_weight = None if class_weight is None else self.cast(class_weight, x.dtype)
        if self.is_float(y):
            y, ignored, row_weight = self.cast(y.reshape(x.shape), x.dtype), ones == 0, ones
        else:
            y = self.cast(y.reshape(-1), self.ops.int64)
            ignored = y == ignore_index
            y = self.ops.where(ignored, 0, y)
            row_weight = ones if class_weight is None else class_weight[y]
        rows = self.row_losses(x, y, class_weight, ignored, label_smoothing)
        rows = rows + z_loss * self.ops.square(self.log_softmax(x)[0])
        a = ones if sample_weight is None else self.cast(cast(Operand, sample_weight).reshape(-1), x.dtype)
        a = self.ops.where(ignored, 0, a)
        loss = self._reduced(rows, a, a * row_weight, reduction, normalizer)
        return cast(Array, loss.reshape(shape) if reduction == "none" else loss)

    def unfused_divergence(
        self,
        logits: Array,
        *,
        teacher: Array | None = None,
        ids: Array | None = None,
        log_probs: Array | None = None,
        tail: str = "",
        kind: str = "kl",
        beta: float = 0.0,
        temperature: float = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        teacher_scale: float = 1.0,
        reduction: str = "mean",
        sample_weight: Array | None = None,
        normalizer: float | None = None,
    ) -> Array:
        """Compute a divergence from (..., V) logits, and teacher logits or a top-k teacher, directly by its formula."""
        _, log_p = self.log_softmax(self._activated(logits, softcap, logit_scale) / temperature)
        if teacher is not None:
            _, log_q = self.log_softmax(self._activated(teacher, teacher_softcap, teacher_scale) / temperature)
            rows = self._between(log_p, log_q, kind, beta)
        else:
            classes, log_q = self.cast(ids, self.ops.int64), self.cast(log_probs, log_p.dtype)
            rows = self._from_top_k(log_p, classes, log_q, tail, kind)
        a = self.ops.ones_like(rows) if sample_weight is None else self.cast(sample_weight, rows.dtype)
        return cast(Array, self._reduced(rows, a, a, reduction, normalizer))

    def unfused_rows(
        self,
        logits: Array,
        target: Array,
        ignored: Array,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: Array | None = None,
        allowed: Array | None = None,
    ) -> dict[str, Array]:
        """Compute lse, nll and entropy (...) from (..., V) logits, as trainers do; they are 0 in `ignored` rows.

        `target` has class indices or class probabilities; `allowed` (..., V) is the mask of each row's support.
        """
        where, x, y = self.ops.where, self._activated(logits, softcap, logit_scale), cast(Operand, target)
        if temperature is not None:
            x = x / cast(Operand, temperature)[..., None]
        if allowed is not None:
            x = where(allowed, x, -math.inf)
        lse, log_p = self.log_softmax(x)
        finite = where(log_p == -math.inf, 0, log_p)
        if self.is_float(y):
            nll = -(y * finite).sum(-1)
        else:
            nll = -self.picked(log_p, self.cast(where(ignored, 0, y), self.ops.int64)[..., None])[..., 0]
            nll = where(nll == math.inf, math.inf, nll)  # a constant: no gradient
        rows = {"lse": lse, "nll": nll, "entropy": -(self.ops.exp(log_p) * finite).sum(-1)}
        return {name: where(ignored, 0, row) for name, row in rows.items()}

    def _reduced(self, rows: Operand, a: Operand, parts: Operand, reduction: str, normalizer: Operand) -> Operand:
        """Reduce rows with weights `a`. Without a normalizer, the mean divides by the sum of `parts`."""
        rows = self.ops.where(a == 0, 0, a * rows)
        if reduction == "none":
            return rows
        if reduction == "sum":
            return rows.sum()
        divisor = parts.sum() if normalizer is None else normalizer
        return rows.sum() / divisor if float(divisor) else rows.sum() * 0

    def _activated(self, z: Operand, softcap: float | None, scale: float) -> Operand:
        x = self.cast(z, None) * scale
        return x if softcap is None else softcap * self.ops.tanh(x / softcap)

    def _between(self, log_p: Operand, log_q: Operand, kind: str, beta: float) -> Operand:
        p, q = self.ops.exp(log_p), self.ops.exp(log_q)
        if kind == "tv":
            return self.ops.abs(p - q).sum(-1) / 2
        if beta == 0:
            return (q * (log_q - log_p)).sum(-1)
        if beta == 1:
            return (p * (log_p - log_q)).sum(-1)
        log_m = self.ops.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
        return beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)

    def _from_top_k(self, log_p: Operand, ids: Operand, log_q: Operand, tail: str, kind: str) -> Operand:
        ops, known = self.ops, log_q != -math.inf
        if tail == "renormalize":
            log_q = self.log_softmax(log_q)[1]
        q, log_p_k = ops.exp(log_q), self.picked(log_p, ids)
        rows = (q * (ops.where(known, log_q, 0) - log_p_k)).sum(-1)
        if tail != "bucket" and kind == "kl":
            return rows
        # Sum over the other classes directly: 1 minus the sum of the K classes could round to 0 or below.
        others = ops.exp(log_p)
        classes = self.array(np.arange(log_p.shape[-1]))
        for k in range(ids.shape[-1]):
            others = ops.where((ids[..., k : k + 1] == classes) & known[..., k : k + 1], 0, others)
        p_left, mass = others.sum(-1), ops.clip(1 - q.sum(-1), 0, None)
        if kind == "tv":
            apart = ops.where(known, ops.exp(log_p_k), 0) - q
            return (ops.abs(apart).sum(-1) + ops.abs(p_left - (mass if tail == "bucket" else 0))) / 2
        has_rest = (mass > 0) & (p_left > 0)
        rest = ops.log(ops.clip(mass, 1e-30, None)) - ops.log(ops.where(has_rest, p_left, 1))
        return rows + ops.where(has_rest, mass * rest, 0)
