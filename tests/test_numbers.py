"""Options may be NumPy numbers, which schedules and configurations often contain."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xent
from tests.targets import Target

OPTIONS = ("label_smoothing", "z_loss", "softcap", "logit_scale", "normalizer")
KINDS: dict[str, Callable[[float], Any]] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "0-d": np.array,
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_numbers(target: Target, option: str, kind: str) -> None:
    logits, classes = target.arrays(np.random.default_rng(0).normal(size=(4, 8)), np.arange(4))
    expected = xent.cross_entropy(logits, classes, backend=target.name, **{option: 0.5})
    found = xent.cross_entropy(logits, classes, backend=target.name, **{option: KINDS[kind](0.5)})
    assert float(found) == float(expected)
    weight = target.arrays(np.random.default_rng(1).normal(size=(8, 8)))[0]
    expected = xent.linear_cross_entropy(logits, weight, classes, backend=target.name, **{option: 0.5})
    found = xent.linear_cross_entropy(logits, weight, classes, backend=target.name, **{option: KINDS[kind](0.5)})
    assert float(found) == float(expected)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_numbers_with_numpy_arrays(option: str, kind: str) -> None:
    logits, classes = np.random.default_rng(0).normal(size=(4, 8)), np.arange(4)
    found = xent.cross_entropy(logits, classes, **{option: KINDS[kind](0.5)})
    assert found == xent.cross_entropy(logits, classes, **{option: 0.5})


@pytest.mark.parametrize("option", OPTIONS)
def test_numpy_numbers_are_validated(target: Target, option: str) -> None:
    logits, classes = target.arrays(np.zeros((4, 8)), np.arange(4))
    for value in (np.float32("nan"), np.array(float("nan"))):
        with pytest.raises(ValueError, match=f"{option} must be .*, got nan"):
            xent.cross_entropy(logits, classes, backend=target.name, **{option: value})
    with pytest.raises(TypeError, match=f"{option} must be a"):
        xent.cross_entropy(logits, classes, backend=target.name, **{option: np.bool_(True)})


@pytest.mark.parametrize("option", ["temperature", "softcap", "logit_scale"])
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_numbers_in_log_probabilities(target: Target, option: str, kind: str) -> None:
    logits, classes = target.arrays(np.random.default_rng(0).normal(size=(4, 8)), np.arange(4))
    (weight,) = target.arrays(np.random.default_rng(1).normal(size=(8, 8)))
    for function, arrays in ((xent.log_probs, (logits,)), (xent.linear_log_probs, (logits, weight))):
        expected = function(*arrays, classes, backend=target.name, **{option: 0.5})
        found = function(*arrays, classes, backend=target.name, **{option: KINDS[kind](0.5)})
        np.testing.assert_array_equal(target.harness.numpy(found), target.harness.numpy(expected))
