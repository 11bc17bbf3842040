"""The structure of the Metal row kernels: threads, vectors, registers, and unaligned memory."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.covering import crossed
from tests.options import OPTIONS
from tests.targets import Target
from xent.backends.metal.sources import LIMITS, threads_and_held
from xent.command.check.case import Case

DTYPES = ("float32", "bfloat16", "float16")
# Numbers of classes around one vector, one SIMD-group, one threadgroup, all that fits in registers, and beyond.
VOCABULARIES = (3, 4, 7, 8, 9, 255, 256, 257, 4095, 4096, 4097, 16_384, 16_390, 32_768, 32_769, 49_153, 70_003)
SOME = ("plain", "all", "probabilities, all")


@pytest.mark.parametrize(*crossed(vocabulary=VOCABULARIES, dtype=DTYPES, name=SOME, reduction=["sum", "none"]))
def test_every_size_of_a_row(target: Target, vocabulary: int, dtype: str, name: str, reduction: str) -> None:
    case = Case("cross_entropy", (3,), vocabulary, dtype, name, OPTIONS[name], reduction=reduction, ignored=0.0)
    target.judge(case)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("limit", LIMITS)
def test_number_of_threads(dtype: mx.Dtype, limit: int) -> None:
    for vocabulary in (1, 2, *VOCABULARIES, 256_000):
        threads, held = threads_and_held(vocabulary, dtype.size, limit)
        packs = vocabulary * dtype.size // 16
        assert threads % 32 == 0
        assert threads <= limit
        assert threads < packs + 32 or threads == 32
        assert held == 8 or threads * held >= packs
        assert held == 1 or threads * held < 2 * packs


def ones(target: Target, count: int) -> Any:
    return target.arrays(np.ones(count))[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", ["all", "all but the target", "first", "last"])
@pytest.mark.parametrize("vocabulary", [5, 40, 9000])
def test_columns_of_minus_infinity(target: Target, dtype: str, columns: str, vocabulary: int) -> None:
    values, classes = np.random.default_rng(1).normal(size=(2, vocabulary)), np.array([2, vocabulary - 2])
    hidden = {
        "all": np.ones((2, vocabulary), bool),
        "all but the target": np.arange(vocabulary) != classes[:, None],
        "first": np.arange(vocabulary) < [[2], [vocabulary - 2]],
        "last": np.arange(vocabulary) > [[2], [vocabulary - 2]],
    }[columns]
    logits, wanted = target.arrays(np.where(hidden, -np.inf, values), classes, dtype=dtype)
    loss, (grad,) = target.harness.gradients(
        lambda z: xent.cross_entropy(z, wanted, reduction="none", backend=target.name), (logits,), ones(target, 2)
    )
    loss, grad = target.harness.numpy(loss), target.harness.numpy(grad)
    if columns == "all":
        assert np.isnan(loss).all()
        return
    expected = xent.cross_entropy(target.harness.numpy(logits), classes, reduction="none")
    np.testing.assert_allclose(loss, expected, rtol=1e-6, atol=1e-7)  # float32 from logits of any dtype
    assert (grad[hidden] == 0).all()
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("vocabulary", [5, 300])
def test_predictions_of_rows_of_infinity_or_nan(target: Target, vocabulary: int) -> None:
    """Like NumPy's argmax: the first column if all are -inf, and NaN before any number."""
    values = np.full((3, vocabulary), -np.inf)
    values[1] = np.arange(vocabulary)
    values[1, 3] = np.nan
    logits, classes = target.arrays(values, np.array([1, 1, 1]))
    _, stats = xent.cross_entropy(logits, classes, stats=("predictions",), backend=target.name)
    assert stats.predictions.tolist() == values.argmax(1).tolist()


def test_gradient_of_a_probable_target_is_exact(target: Target) -> None:
    """If the target's p is near 1, p - 1 is computed as minus the sum of all other p, because 1 - p would cancel."""
    logits, classes = target.arrays(np.array([[30.0, 0.0, 1.0, -2.0]]), np.array([0]))
    loss, (grad,) = target.harness.gradients(
        lambda z: xent.cross_entropy(z, classes, backend=target.name), (logits,), None
    )
    others = np.exp(np.array([0.0, 1.0, -2.0]) - 30)
    target.close(loss, others.sum(), rtol=1e-5)
    np.testing.assert_allclose(target.harness.numpy(grad)[0], [-others.sum(), *others], rtol=1e-5)
