"""The arithmetic of the Metal kernels, function by function, against float64."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from tests.targets import Target
from xent.backends.metal import sources

BODY = """
    uint i = thread_position_in_grid.x;
    float slope = 0.0f;
    if (i < static_cast<uint>(x_shape[0])) out[i] = {};
    if (i < static_cast<uint>(x_shape[0]) && slope != 0.0f) slopes[i] = slope;
"""
ALL = np.linspace(-1, 1, 4001)
TINY = np.geomspace(1e-30, 1e-3, 500)


def computed(expression: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    name = "".join(letter if letter.isalnum() else "_" for letter in expression)
    kernel = mx.fast.metal_kernel(
        f"maths_{name}", ["x"], ["out", "slopes"], BODY.format(expression), header=sources._read("maths")
    )
    out = kernel(
        inputs=[mx.array(x)],
        output_shapes=[x.shape, x.shape],
        output_dtypes=[mx.float32, mx.float32],
        grid=(x.size, 1, 1),
        threadgroup=(64, 1, 1),
    )
    return np.array(out[0]), np.array(out[1])


def units(found: np.ndarray, truth: np.ndarray) -> float:
    """Return the largest error in units in the last place of the truth."""
    return float((np.abs(found - truth) / np.spacing(np.abs(truth).astype(np.float32))).max())


@pytest.mark.parametrize(
    ("expression", "function", "places", "bound"),
    [
        ("xent::exact_exp(x[i])", np.exp, 87 * ALL, 1.0),
        ("xent::exact_exp(x[i])", np.exp, ALL, 1.0),
        ("xent::exact_log(x[i])", np.log, np.geomspace(1.7, 1e30, 5000), 2.0),
        ("xent::exact_log(x[i])", np.log, 1.5 + ALL, 5.0),
        ("xent::log1p(x[i])", np.log1p, np.concatenate([TINY, 1 + ALL, 1000 * (1 + ALL)]), 6.0),
        ("xent::expm1(x[i])", np.expm1, -np.concatenate([TINY, 1 + ALL, 40 * (1 + ALL)]), 2.0),
        ("xent::tanh<float>(x[i], slope)", np.tanh, np.concatenate([TINY, -TINY, ALL, 20 * ALL]), 3.0),
    ],
)
def test_few_units_in_the_last_place(
    target: Target, expression: str, function: Callable[[np.ndarray], np.ndarray], places: np.ndarray, bound: float
) -> None:
    x = places.astype(np.float32)
    truth = function(x.astype(np.float64))
    normal = np.abs(truth) > 1.2e-38  # Metal may flush smaller numbers to 0
    found, _ = computed(expression, x)
    assert units(found[normal], truth[normal]) <= bound


def test_slope_of_tanh_does_not_cancel(target: Target) -> None:
    x = np.concatenate([ALL, 40 * ALL]).astype(np.float32)
    _, slopes = computed("xent::tanh<float>(x[i], slope)", x)
    assert units(slopes, np.cosh(x.astype(np.float64)) ** -2) <= 6


@pytest.mark.parametrize(
    ("expression", "places", "values"),
    [
        ("xent::exact_exp(x[i])", [0, -np.inf, np.inf, np.nan, -200, 200], [1, 0, np.inf, np.nan, 0, np.inf]),
        ("xent::exact_log(x[i])", [1, 0, np.inf, np.nan], [0, -np.inf, np.inf, np.nan]),
        ("xent::log1p(x[i])", [0, np.inf, np.nan], [0, np.inf, np.nan]),
        ("xent::expm1(x[i])", [0, -np.inf, np.nan], [0, -1, np.nan]),
        ("xent::tanh<float>(x[i], slope)", [0, np.inf, -np.inf, np.nan], [0, 1, -1, np.nan]),
        ("xent::tanh<half>(x[i], slope)", [0, np.inf, -np.inf, np.nan], [0, 1, -1, np.nan]),
        ("xent::exponential<half>(x[i])", [0, -np.inf, np.nan], [1, 0, np.nan]),
        ("xent::times(x[i], INFINITY)", [0, 2], [0, np.inf]),
    ],
)
def test_special_values(target: Target, expression: str, places: list[float], values: list[float]) -> None:
    padded = [*places, *([0.0] * 8)]
    found, _ = computed(expression, np.array(padded, np.float32))
    np.testing.assert_array_equal(found[: len(values)], values)
