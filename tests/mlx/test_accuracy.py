"""In low precision the loss does not have the rounding error of the target's logit."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.mlx.quantized import expect_right_products
from tests.targets import Target


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("quantized", [False, True])
def test_loss_is_more_exact_than_rounded_logits(target: Target, dtype: mx.Dtype, quantized: bool) -> None:
    rng = np.random.default_rng(0)
    x, w = mx.array(rng.normal(size=(40, 64)), dtype), mx.array(rng.normal(size=(500, 64)) / 8, dtype)
    y = mx.array(rng.integers(0, 500, 40))
    weight = w
    if quantized:
        weight = xent.QuantizedWeight(*mx.quantize(w, group_size=64, bits=8), bits=8)
        expect_right_products(x, weight, group_size=64, bits=8)
    w = mx.dequantize(weight.packed, weight.scales, weight.biases, group_size=64, bits=8) if quantized else w
    found = xent.linear_cross_entropy(x, weight, y, reduction="none", backend=target.name)
    wide = (np.array(array.astype(mx.float32)).astype(np.float64) for array in (x, w))
    truth = xent.linear_cross_entropy(*wide, np.array(y), reduction="none")
    product = (
        mx.quantized_matmul(x, weight.packed, weight.scales, weight.biases, group_size=64, bits=8)
        if quantized
        else x @ w.T
    )
    rounded = product.astype(mx.float32)
    plain = mx.logsumexp(rounded, axis=-1) - mx.take_along_axis(rounded, y[:, None], -1)[:, 0]
    errors = [np.abs(np.array(values) - truth).mean() for values in (found, plain)]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("options", [{"weight": [0.0, 1.0, 1.0], "label_smoothing": 0.1}, {"z_loss": 0.01}], ids=str)
def test_gradient_of_improbable_targets_is_exact(target: Target, options: dict[str, Any]) -> None:
    """If 1 - p_y is rounded to 1, the contribution of p_y times the other terms must not be lost."""
    z, y = np.array([[-20.0, 0.0, 0.0], [0.0, 30.0, 0.0]], np.float32), np.array([0, 0])
    options = dict(options)
    weight = options.pop("weight", None)

    def gradient(dtype: mx.Dtype, device: Any, backend: str) -> np.ndarray:
        with mx.stream(device):
            w = None if weight is None else mx.array(weight, dtype)
            made = mx.grad(
                lambda x: xent.cross_entropy(x, mx.array(y), weight=w, reduction="sum", backend=backend, **options)
            )(mx.array(z, dtype))
            return np.array(made)[:, 0]

    expected = gradient(mx.float64, mx.cpu, "mlx")
    np.testing.assert_allclose(gradient(mx.float32, getattr(mx, target.device), target.name), expected, rtol=1e-5)
