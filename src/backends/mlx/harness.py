"""What the gradient checks need to drive MLX: arrays in and out, gradients, and the yardstick computation."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np

from xent.backends.mlx.devices import devices
from xent.core.check.cases import Case
from xent.core.check.long import long_cases

__all__ = ["MlxHarness"]


class MlxHarness:
    """A `xent.backends.protocol.Harness` for one device.

    On NVIDIA MLX multiplies float32 in TF32 unless told otherwise before the first product: that rounding, different in
    each product, would be all that a check sees.
    """

    def __init__(self, device: str | None = None) -> None:
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
        self.device = device or devices()[0]
        self.dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16")[self.device != "cpu" :]
        self.kernels: tuple[str, ...] = ("MLX's own operations",)

    def watched(self) -> AbstractContextManager[set[str]]:
        """Name MLX, of whose operations the plain row kernel is made."""
        return nullcontext(set(self.kernels))

    def reaching(self, function: str, dtype: str) -> list[Case]:
        """Return rows of several blocks, and several chunks."""
        return long_cases(function, dtype, {"several blocks": 100_003})

    def passed(self) -> None:
        """Do nothing: this backend is taken in any case."""

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
        self, function: Callable[..., mx.array], inputs: tuple[mx.array, ...], upstream: mx.array | None
    ) -> tuple[mx.array, list[mx.array]]:
        """Return `function(*inputs)` and its gradients."""

        def total(*arrays: mx.array) -> tuple[mx.array, mx.array]:
            loss = function(*arrays)
            return (loss if upstream is None else loss * upstream).sum(), loss

        with mx.stream(getattr(mx, self.device)):
            (_, loss), made = mx.value_and_grad(total, argnums=tuple(range(len(inputs))))(*inputs)
            gradients = [made] if isinstance(made, mx.array) else list(made)  # of one input MLX returns no tuple
            mx.eval(loss, gradients)
        return loss, gradients

    def linear(self, input: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        """Return the logits that the unfused computation holds."""
        if 0 in input.shape:  # on NVIDIA MLX crashes over such a product
            return mx.zeros((*input.shape[:-1], weight.shape[0]), input.dtype)
        return input @ weight.T if bias is None else mx.addmm(bias, input, weight.T)

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
        """Compute the loss in float32 (float64 for float64), the way careful training scripts do."""
        wide = mx.float64 if logits.dtype == mx.float64 else mx.float32
        x = logits.astype(wide) * logit_scale
        if softcap is not None:
            x = softcap * mx.tanh(x / softcap)
        vocabulary = x.shape[-1]
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
        rows = mx.where(a == 0, 0, a * rows)
        if reduction == "none":
            return rows.reshape(logits.shape[:-1])
        if reduction == "sum":
            return rows.sum()
        divisor = (a * row_weight).sum() if normalizer is None else normalizer
        return rows.sum() / divisor if float(divisor) else rows.sum() * 0
