"""Tests of the Metal kernels that need an Apple GPU: launches inside of compiled functions."""

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.targets import Target

RNG = np.random.default_rng(0)
ROWS, WIDTH, VOCABULARY = 64, 32, 4099


def arrays() -> tuple[mx.array, mx.array, mx.array]:
    hidden = mx.array(RNG.normal(size=(ROWS, WIDTH)).astype(np.float32))
    classifier = mx.array(RNG.normal(size=(VOCABULARY, WIDTH)).astype(np.float32))
    return hidden, classifier, mx.array(RNG.integers(0, VOCABULARY, ROWS))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_is_the_same(target: Target, reduction: str) -> None:
    hidden, classifier, classes = arrays()

    def loss(h: mx.array, w: mx.array) -> mx.array:
        options = {"reduction": reduction, "z_loss": 0.1, "workspace": 2**18}
        return xent.linear_cross_entropy(h, w, classes, backend=target.name, **options).sum()

    plain = mx.value_and_grad(loss, argnums=(0, 1))
    expected, gradients = plain(hidden, classifier)
    found, compiled = mx.compile(plain)(hidden, classifier)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-5)
    for one, other in zip(compiled, gradients, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-4, atol=1e-6)


def test_new_value_of_an_option_retraces_nothing(target: Target) -> None:
    hidden, classifier, classes = arrays()
    logits, traces = hidden @ classifier.T, []

    @mx.compile
    def loss(z: mx.array, z_loss: mx.array) -> mx.array:
        traces.append(None)
        return xent.cross_entropy(z, classes, z_loss=z_loss, backend=target.name)

    values = [loss(logits, mx.array(z_loss)).item() for z_loss in (0.0, 0.1, 0.2)]
    assert len(traces) == 1
    assert values[2] - values[1] == pytest.approx(values[1] - values[0], rel=1e-3)
