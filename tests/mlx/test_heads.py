"""Several heads in compiled functions of MLX, and their memory."""

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.mlx.test_work import MIB, peak
from tests.targets import Target

V, D = 11, 8
RNG = np.random.default_rng(5)
ARRAYS = {
    "input": mx.array(RNG.normal(size=(2, 3, 5, D)).astype(np.float32)),
    "linear_weight": mx.array(RNG.normal(size=(V, D)).astype(np.float32)),
    "target": mx.array(RNG.integers(0, V, (3, 5))),
    "weight": mx.array(RNG.uniform(0.5, 1, V).astype(np.float32)),
    "sample_weight": mx.array(RNG.uniform(0.5, 1, (3, 5)).astype(np.float32)),
    "normalizer": mx.array(3.0),
}


def test_compiled_gradients_are_the_same_and_a_new_normalizer_retraces_nothing(target: Target) -> None:
    traces = []

    def loss(x: mx.array, w: mx.array, normalizer: mx.array) -> mx.array:
        traces.append(normalizer)
        given = ARRAYS | {"input": x, "linear_weight": w, "normalizer": normalizer}
        return xent.linear_cross_entropy(**given, shift=(1, 2), head_weight=(1.0, 0.5), backend=target.name)

    step = mx.value_and_grad(loss, argnums=(0, 1))
    compiled = mx.compile(step)
    for normalizer in (1.0, 2.0, 0.0):
        arguments = ARRAYS["input"], ARRAYS["linear_weight"], mx.array(normalizer)
        (value, found), (expected_value, expected) = compiled(*arguments), step(*arguments)
        for one, other in zip((value, *found), (expected_value, *expected), strict=True):
            np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-5, atol=1e-7)
    assert len(traces) == 4


@pytest.mark.parametrize("compiled", [False, True])
def test_four_heads_hold_one_gradient_of_the_classifier(target: Target, compiled: bool) -> None:
    """Four separate calls hold four gradients of 15.6 MiB, and take 70 MiB or more. Chunks of logits take 7.8 MiB."""
    x, w = mx.random.normal((4, 16, 128)), mx.random.normal((32000, 128))
    y = mx.random.randint(0, 32000, (16,))
    mx.eval(x, w, y)
    step = mx.value_and_grad(
        lambda x, w: xent.linear_cross_entropy(x, w, y, shift=(1, 2, 3, 4), backend=target.name), argnums=(0, 1)
    )
    step = mx.compile(step) if compiled else step
    assert peak(lambda: step(x, w)) <= 50 * MIB
