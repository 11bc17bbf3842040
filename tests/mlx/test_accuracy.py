"""Gradients of improbable targets, where a difference of nearly equal numbers would lose their digits."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.targets import Target


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
