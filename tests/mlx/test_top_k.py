"""The most probable classes in MLX: compiled, of quantized classifiers."""

import mlx.core as mx
import numpy as np

import xent
from tests.targets import Target


def test_compiled(target: Target) -> None:
    def call(hidden: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
        teacher = xent.linear_top_k(hidden, weight, 5, workspace=400, backend=target.name)
        return teacher.ids, teacher.log_probs

    hidden, weight = mx.random.normal((2, 6, 8), key=mx.random.key(0)), mx.random.normal((90, 8), key=mx.random.key(1))
    for compiled, eager in zip(mx.compile(call)(hidden, weight), call(hidden, weight), strict=True):
        np.testing.assert_allclose(np.array(compiled), np.array(eager), rtol=1e-5)


def test_a_quantized_classifier(target: Target) -> None:
    hidden, weight = mx.random.normal((6, 64), key=mx.random.key(0)), mx.random.normal((90, 64), key=mx.random.key(1))
    head = xent.QuantizedWeight(*mx.quantize(weight, group_size=64, bits=4))
    rows = mx.dequantize(head.packed, head.scales, head.biases, group_size=64, bits=4)
    quantized, dense = (xent.linear_top_k(hidden, each, 5, backend=target.name) for each in (head, rows))
    np.testing.assert_array_equal(np.array(quantized.ids), np.array(dense.ids))
    np.testing.assert_allclose(np.array(quantized.log_probs), np.array(dense.log_probs), rtol=1e-4)
