"""Numbers as arguments: NumPy's, at the edges of a dtype, and a z-loss of 0 where lse is infinite."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xent
from tests.cases import FUNCTIONS, LOG_PROBS
from tests.targets import Target

RNG = np.random.default_rng(0)
LOGITS, CLASSES = RNG.normal(size=(4, 7)), np.array([0, 2, 6, 2])
HIDDEN, CLASSIFIER = RNG.normal(size=(4, 5)), RNG.normal(size=(7, 5))
OPTIONS = ("label_smoothing", "z_loss", "softcap", "logit_scale", "normalizer")
KINDS: dict[str, Callable[[float], Any]] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "0-d": np.array,
}
PLACES = [(function, option) for function in FUNCTIONS for option in OPTIONS]
PLACES += [(function, option) for function in LOG_PROBS for option in ("temperature", "softcap", "logit_scale")]


@pytest.mark.parametrize(("function", "option"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_numbers(target: Target, function: str, option: str, kind: str) -> None:
    drawn = (HIDDEN, CLASSIFIER) if function.startswith("linear") else (LOGITS,)
    calls = [
        (target.harness.numpy, *target.arrays(*drawn, CLASSES), {"backend": target.name}),
        (np.asarray, *drawn, CLASSES, {}),
    ]
    for to_numpy, *arrays, more in calls:
        found, expected = (getattr(xent, function)(*arrays, **{option: n}, **more) for n in (KINDS[kind](0.5), 0.5))
        np.testing.assert_array_equal(to_numpy(found), to_numpy(expected))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("function", "option"), PLACES)
def test_numbers_of_16_bits_are_not_rounded_again(target: Target, function: str, option: str, dtype: str) -> None:
    arrays = target.arrays(*((HIDDEN, CLASSIFIER) if function.startswith("linear") else (LOGITS,)))
    (classes,), (value,) = target.arrays(CLASSES), target.arrays(np.array(0.3), dtype=dtype)
    (upstream,) = target.arrays(np.ones(4) if function in LOG_PROBS else np.ones(()))

    def results(number: Any) -> Any:
        def run(*given: Any) -> Any:
            options = ({"temperature": 0.7} if function in LOG_PROBS else {}) | {option: number}
            return (getattr(xent, function)(*given, classes, backend=target.name, **options),)

        (values,), gradients = target.harness.gradients(run, arrays, (upstream,))
        return values, *gradients

    exact = float(target.harness.numpy(value))
    for found, expected in zip(results(value), results(exact), strict=True):
        target.close(found, expected, rtol=1e-6, atol=2e-6)


def mean_of(target: Target, function: str, dtype: str, weights: Any = None, **options: Any) -> float:
    arrays = (LOGITS,) if function == "cross_entropy" else (HIDDEN, CLASSIFIER)
    given = target.arrays(*arrays, dtype=dtype)
    if weights is not None:
        options["sample_weight"] = target.harness.array(weights, dtype)
    loss = getattr(xent, function)(*given, target.harness.array(CLASSES), backend=target.name, **options)
    return float(target.harness.numpy(loss))


def gradient_of(target: Target, dtype: str, weights: Any = None, **options: Any) -> Any:
    if weights is not None:
        options["sample_weight"] = target.harness.array(weights, dtype)
    classes = target.harness.array(CLASSES)

    def call(logits: Any) -> Any:
        return xent.cross_entropy(logits, classes, backend=target.name, **options)

    _, (gradient,) = target.harness.gradients(call, target.arrays(LOGITS, dtype=dtype), None)
    return target.harness.numpy(gradient)


@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy", "log_probs", "linear_log_probs"])
def test_integers_of_numpy(target: Target, function: str) -> None:
    arrays = (HIDDEN, CLASSIFIER) if function.startswith("linear") else (LOGITS,)
    given, classes = target.arrays(*arrays), target.harness.array(CLASSES)
    found = []
    for kind in (int, np.int64, np.int32):
        options = {"ignore_index": kind(2), "backend": target.name}
        if function.startswith("linear"):
            options["shift"] = kind(1)
        else:
            options["axis"] = kind(1)
        found.append(target.harness.numpy(getattr(xent, function)(*given, classes, **options)))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e-36), ("float32", 1e-38), ("float64", 1e-300)])
def test_small_divisors(target: Target, function: str, dtype: str, size: float) -> None:
    """Weights and normalizer of one size give the loss and the gradient of weights and a normalizer of 1."""
    if not target.takes(dtype):
        return
    expected = mean_of(target, function, dtype, np.ones(4), normalizer=3.0)
    found = mean_of(target, function, dtype, np.full(4, size), normalizer=3 * size)
    assert found == pytest.approx(expected, rel=1e-4)
    gradients = [gradient_of(target, dtype, np.full(4, one), normalizer=3 * one) for one in (1.0, size)]
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)


def expected_error(error: ValueError) -> None:
    """Fail if the message does not name the argument."""
    if "normalizer" not in str(error):
        raise error


@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_divisors_below_the_normal_numbers_work_or_are_an_error(target: Target, function: str) -> None:
    """1 / 1e-39 is infinite in float32. Weights of that size have few digits, and some devices take them for 0."""
    expected = mean_of(target, function, "float32", np.ones(4), normalizer=3.0)
    for weights, normalizer in ((np.full(4, 1e-39 / 3), 1e-39), (np.full(4, 2.5e-41), None)):
        wanted = expected if normalizer else mean_of(target, function, "float32", np.ones(4))
        try:
            found = mean_of(target, function, "float32", weights, normalizer=normalizer)
            gradient = gradient_of(target, "float32", weights, normalizer=normalizer)
        except ValueError as error:
            expected_error(error)
            continue
        assert found == pytest.approx(wanted, rel=1e-3) or found == 0
        assert np.isfinite(gradient).all()


def test_a_normalizer_below_the_normal_numbers_gives_no_nan(target: Target) -> None:
    for normalizer in (1e-39, 1e-45):
        try:
            gradient = gradient_of(target, "float32", np.zeros(4), normalizer=normalizer)
        except ValueError as error:
            expected_error(error)
            continue
        assert not gradient.any()


LARGE_FACTORS: dict[str, dict[str, Any]] = {
    "z_loss": {"z_loss": 0.5, "size": 300, "normalizer": 100.0},
    "z_loss, larger": {"z_loss": 50.0, "size": 300, "normalizer": 1e4},
    "smoothing, weight": {"label_smoothing": 0.1, "weight": 1e4, "size": 1},
    "smoothing, weight, classifier": {"label_smoothing": 0.1, "weight": 10.0, "size": 300},
    "probabilities, weight": {"weight": 3e5, "size": 1},
    "logit_scale": {"logit_scale": 2e5, "size": 1e-4},
}


@pytest.mark.parametrize("name", LARGE_FACTORS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_float16_gradients_do_not_overflow_before_the_division(target: Target, function: str, name: str) -> None:
    """The gradients of one row would be infinite in float16, but not those of the mean."""
    rng, options = np.random.default_rng(0), dict(LARGE_FACTORS[name])
    hidden, classifier = rng.normal(size=(16, 32)) * 0.3, rng.normal(size=(64, 32)) * options.pop("size")
    is_linear, classes = function.startswith("linear"), rng.integers(0, 64, 16)
    placed: dict[str, Any] = {"target": classes}
    if "weight" in options:
        placed["weight"] = rng.random(64) * options["weight"]
        placed["weight"][classes] = 1e-3
    if name.startswith("probabilities"):
        placed["target"] = rng.dirichlet(np.ones(64), 16)
    options |= dict(zip(placed, target.arrays(*placed.values()), strict=True))
    arrays = target.arrays(*((hidden, classifier) if is_linear else (hidden @ classifier.T,)), dtype="float16")
    wide = target.arrays(*map(target.harness.numpy, arrays))
    upstream = target.arrays(np.ones(()))

    def run(*given: Any) -> Any:
        return (getattr(xent, function)(*given, **options, backend=target.name),)

    def unfused(*given: Any) -> Any:
        logits = target.harness.linear(*given, None) if is_linear else given[0]
        return (target.harness.unfused_loss(logits, **options),)

    found = target.harness.gradients(run, arrays, upstream)[1]
    expected = map(target.harness.numpy, target.harness.gradients(unfused, wide, upstream)[1])
    for one, other in zip(map(target.harness.numpy, found), expected, strict=True):
        assert np.abs(other).max() < 6e4
        assert np.linalg.norm(one - other) <= 0.05 * np.linalg.norm(other)


def test_float16_gradients_of_a_frequent_class_do_not_overflow(target: Target) -> None:
    """The divisor of a mean is applied in float32, or before the sum over rows."""
    rows = 64 if target.interpreted else 2048  # enough to overflow in the driver's sum, not only in a kernel's
    hidden, weight = target.arrays(np.full((rows, 4), 60.0), np.zeros((16, 4)), dtype="float16")
    (classes,) = target.arrays(np.zeros(rows, np.int64))
    _, (gradient,) = target.harness.gradients(
        lambda w: xent.linear_cross_entropy(hidden, w, classes, backend=target.name), (weight,), None
    )
    expected = np.full((16, 4), 60 / 16)
    expected[0] -= 60
    target.close(gradient, expected, rtol=2e-3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "softcap": 8.0}, {"label_smoothing": 0.1}], ids=str)
def test_float16_gradient_beside_a_heavier_row(target: Target, reduction: str, options: dict[str, float]) -> None:
    """Its elements are rounded as they are, not as parts of the heavier row: numbers below 2^-14 to units of 2^-24."""
    values, weights = np.random.default_rng(0).normal(size=(2, 600)), np.array([64.0, 0.25])
    classes, sample_weight = target.arrays(np.array([3, 5]), weights)
    keywords = options | {"reduction": reduction} | ({"normalizer": 1.0} if reduction == "mean" else {})

    def gradient_of(logits: Any) -> Any:
        _, (gradient,) = target.harness.gradients(
            lambda z: xent.cross_entropy(z, classes, sample_weight=sample_weight, backend=target.name, **keywords),
            (logits,),
            None,
        )
        return target.harness.numpy(gradient)

    (logits,) = target.arrays(values, dtype="float16")
    (wide,) = target.arrays(target.harness.numpy(logits))
    np.testing.assert_allclose(gradient_of(logits), gradient_of(wide), rtol=2.0**-10, atol=2.0**-24)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_gradient_of_probabilities_with_a_large_sum(target: Target, reduction: str) -> None:
    """It is below the largest number of float16, and so is what is stored before the division."""
    values, probs = np.array([[9.0, 1.0, 0.0], [0.0, 1.0, 2.0]]), np.array([[0.0, 3e4, 2e4], [1.0, 0.0, 0.0]])
    logits, classes = target.arrays(values, probs, dtype="float16")

    def gradient_of(logits: Any, classes: Any) -> Any:
        _, (gradient,) = target.harness.gradients(
            lambda z: xent.cross_entropy(z, classes, reduction=reduction, backend=target.name), (logits,), None
        )
        return target.harness.numpy(gradient)

    wide = target.arrays(values, probs)
    np.testing.assert_allclose(gradient_of(logits, classes), gradient_of(*wide), rtol=2.0**-9, atol=2.0**-10)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_statistic_of_a_z_loss_of_0_is_0(target: Target, value: float, reduction: str) -> None:
    logits = LOGITS.copy()
    logits[1] = value
    given, classes = target.arrays(logits)[0], target.harness.array(CLASSES)
    _, stats = xent.cross_entropy(given, classes, reduction=reduction, stats=("z_loss",), backend=target.name)
    assert not target.harness.numpy(stats.z_loss).any()
    hidden, classifier = target.arrays(HIDDEN, CLASSIFIER)
    bias = target.arrays(np.where(np.arange(7) == 3, np.inf, 0.0))[0]
    options = {"reduction": reduction, "stats": ("z_loss",), "backend": target.name}
    _, stats = xent.linear_cross_entropy(hidden, classifier, classes, linear_bias=bias, **options)
    assert not target.harness.numpy(stats.z_loss).any()
