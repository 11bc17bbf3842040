"""A quantized classifier: the loss of its unpacked weight, gradients for other inputs, and no full unpacking."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.mlx.quantized import expect_right_products
from tests.mlx.test_work import peak
from tests.targets import Target

N, D, V = 12, 64, 40
RNG = np.random.default_rng(0)
X = mx.array(RNG.normal(size=(N, D)).astype(np.float32))
W = mx.array(RNG.normal(size=(V, D)).astype(np.float32))
B = mx.array(RNG.normal(size=(V,)).astype(np.float32))
Y = mx.array(np.where(np.arange(N) % 4 == 3, -100, RNG.integers(0, V, N)))

FORMS = [
    {"group_size": 64, "bits": 4, "mode": "affine"},
    {"group_size": 32, "bits": 8, "mode": "affine"},
    {"group_size": 64, "bits": 3, "mode": "affine"},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
]


def packed(form: dict[str, Any], dtype: mx.Dtype = mx.float32, weight: mx.array = W) -> xent.QuantizedWeight:
    parts = mx.quantize(weight.astype(dtype), **form)
    return xent.QuantizedWeight(*parts, **({"biases": None} if len(parts) == 2 else {}), **form)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_log_probs", "linear_divergence"])
def test_results_of_rows_are_those_of_the_unpacked_weight(
    target: Target, function: str, form: dict[str, Any], dtype: mx.Dtype
) -> None:
    """Its scales are not converted, and the unpacked weight is not rounded. A teacher may have one too."""
    packed_weights = [packed(form, dtype, weight) for weight in (W, W[::-1])]
    assert packed_weights[0].shape == (V, D)
    x, b = X.astype(dtype), B.astype(dtype)

    def unpacked(given: xent.QuantizedWeight) -> mx.array:
        parts = [part for part in (given.scales, given.biases) if part is not None]
        wide = [part if part.dtype == mx.uint8 else part.astype(mx.float32) for part in parts]
        return mx.dequantize(given.packed, *wide, **form).astype(mx.float32)

    def results(x: mx.array, weight: Any, teacher: Any, b: mx.array) -> list[mx.array]:
        options = {"linear_bias": b, "workspace": 5 * V * 4, "backend": target.name}
        if function == "linear_log_probs":
            return list(xent.linear_log_probs(x, weight, Y, entropy=True, **options))
        if function == "linear_cross_entropy":
            return [xent.linear_cross_entropy(x, weight, Y, reduction="none", **options)]
        source = xent.LinearTeacher(x[::-1], teacher, b)
        return [xent.linear_divergence(x, weight, source, reduction="none", **options)]

    for weight in packed_weights:
        expect_right_products(x, weight, **form)
    wide = x.astype(mx.float32), *map(unpacked, packed_weights), b.astype(mx.float32)
    found, expected = (
        [
            *results(*given),
            *mx.grad(lambda x, b, w=given: sum(map(mx.sum, results(x, *w[1:3], b))), argnums=(0, 1))(
                given[0], given[3]
            ),
        ]
        for given in ((x, *packed_weights, b), wide)
    )
    closes = [1e-5] * (len(found) - 2) + [{4: 1e-5, 2: 2.0**-6}[dtype.size]] * 2
    if function == "linear_cross_entropy":  # its logits, of up to 20, are rounded
        closes = [10 * {mx.float32: 1e-6, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]] * 3
    for one, other, close in zip(found, expected, closes, strict=True):
        difference = mx.linalg.norm(one.astype(mx.float32) - other)
        assert difference.item() <= close * mx.linalg.norm(other).item()


def test_weight_is_never_fully_unpacked(target: Target) -> None:
    x, w = mx.random.normal((128, 512)), mx.random.normal((4000, 512))
    y = mx.random.randint(0, 4000, (128,))
    weight = xent.QuantizedWeight(*mx.quantize(w, group_size=64, bits=4), group_size=64, bits=4)
    mx.eval(x, w, y, weight.packed, weight.scales, weight.biases)

    def loss(x: mx.array) -> mx.array:
        return xent.linear_cross_entropy(x, weight, y, workspace=2**18, backend=target.name)

    assert peak(lambda: mx.value_and_grad(loss)(x)) <= 0.6 * w.nbytes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"packed": W}, TypeError, r"linear_weight\.packed must be a uint32 array"),
        ({"scales": mx.ones((V, 3))}, ValueError, r"linear_weight\.scales must have shape \(40, 1\)"),
        ({"bits": 0}, ValueError, r"linear_weight\.bits must be an int > 0, got 0"),
        ({"bits": 8}, ValueError, r"linear_weight must have shape \(V, D\) with D = 64|scales must have shape"),
        ({"scales": np.ones((V, 1))}, TypeError, r"linear_weight\.scales a numpy array"),
        ({"packed": None}, TypeError, r"linear_weight\.packed"),
    ],
    ids=str,
)
def test_errors_name_the_invalid_part(change: dict[str, Any], error: type[Exception], message: str) -> None:
    weight = packed(FORMS[0])
    parts = {name: getattr(weight, name) for name in ("packed", "scales", "biases", "group_size", "bits", "mode")}
    with pytest.raises(error, match=message):
        xent.linear_cross_entropy(X, xent.QuantizedWeight(**(parts | change)), Y)


def test_other_frameworks_refuse_quantized_weights() -> None:
    weight = xent.QuantizedWeight(np.zeros((4, 8), np.uint32), np.ones((4, 1)), np.ones((4, 1)))
    with pytest.raises(TypeError, match="a QuantizedWeight holds MLX arrays"):
        xent.linear_cross_entropy(np.zeros((2, 64)), weight, np.array([0, 1]))
