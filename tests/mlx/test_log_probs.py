"""Log-probabilities in MLX, beyond the matrix: unevaluated arrays, bitwise equality, and memory."""

import io
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.mlx.quantized import expect_right_products
from tests.mlx.test_quantized import FORMS
from tests.mlx.test_work import peak
from tests.targets import Target
from xent.backends.mlx import sources
from xent.backends.reference import linear_cross_entropy_gradients
from xent.core.describe import linear_log_probs_call
from xent.core.spec import LOG_PROB_STATS

RNG = np.random.default_rng(3)
N, D, V = 12, 64, 40
X, W, B = (RNG.normal(size=shape) / D**0.25 for shape in ((N, D), (V, D), (V,)))
Y = np.where(np.arange(N) % 5 == 3, -100, RNG.integers(0, V, N))
T = RNG.uniform(0.5, 2, N)
SIZES = np.array([V, 0, 1, 5, 0, 7, 30, V, 2, 1, 9, 0])
DTYPES = [mx.float32, mx.bfloat16, mx.float16]


def support() -> xent.Support:
    """Return a support. Non-empty sets begin with their row's target, except that of row 10."""
    sets = [np.concatenate([[max(y, 0)], RNG.permutation(np.delete(np.arange(V), max(y, 0)))]) for y in Y]
    taken = [classes[:size] for classes, size in zip(sets, SIZES, strict=True)]
    taken[10] = sets[10][1:10]
    return xent.Support(np.concatenate(taken).astype(np.int64), np.cumsum([0, *map(len, taken)]))


SUPPORT = support()


def ours(given: xent.Support = SUPPORT) -> xent.Support:
    return xent.Support(mx.array(given.ids), mx.array(given.offsets))


def arrays(dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    return [mx.array(values, mx.float32).astype(dtype) for values in (X, W, B)]


def wide(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def call(target: Target, function: str = "linear_log_probs", dtype: mx.Dtype = mx.float32, **options: Any) -> Any:
    """Return the results. The logits for log_probs are products that MLX has rounded."""
    x, w, _ = arrays(dtype)
    chunks = {"workspace": 5 * V * 4}
    given, chunks = ((x, w), chunks) if function == "linear_log_probs" else ((x @ w.T,), {})
    return getattr(xent, function)(*given, mx.array(Y), backend=target.name, **chunks, **options)


FUNCTIONS = ("log_probs", "linear_log_probs")
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "rows, softcap": {"temperature": mx.array(T, mx.float32), "softcap": 3.0, "logit_scale": -1.5},
    "support": {"temperature": mx.array(T, mx.float32), "support": ours()},
    "support, softcap": {"temperature": mx.array(1.4), "softcap": 3.0, "support": ours()},
    "support, scale": {"logit_scale": -0.6, "support": ours()},
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_row_statistics_equal_the_reference(target: Target, function: str, dtype: mx.Dtype, name: str) -> None:
    options = ASKED[name]
    *found, stats = call(target, function, dtype, entropy=True, stats=LOG_PROB_STATS, **options)
    given = {key: wide(value) if isinstance(value, mx.array) else value for key, value in options.items()}
    if "support" in given:
        given["support"] = SUPPORT
    if np.shape(given.get("temperature")) == ():
        given["temperature"] = float(given.get("temperature", 1.0))
    source = map(wide, arrays(dtype)[:2] if function == "linear_log_probs" else [call_logits(dtype)])
    *expected, truth = getattr(xent, function)(*source, Y, entropy=True, stats=LOG_PROB_STATS, **given)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(one), other, rtol=2e-6, atol=2e-6)
    for stat in LOG_PROB_STATS:
        one, other = np.array(getattr(stats, stat)), getattr(truth, stat)
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6, err_msg=stat)


def call_logits(dtype: mx.Dtype = mx.float32) -> mx.array:
    x, w, _ = arrays(dtype)
    return x @ w.T


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_same_bits_with_and_without_gradients_and_statistics(
    target: Target, function: str, dtype: mx.Dtype, name: str
) -> None:
    options = {"dtype": dtype} | ASKED[name]
    alone = call(target, function, **options)
    together, entropy, stats = call(target, function, entropy=True, stats=LOG_PROB_STATS, **options)
    assert mx.array_equal(alone, together, equal_nan=True)
    assert mx.array_equal(entropy, call(target, function, entropy=True, **options)[1], equal_nan=True)
    assert mx.array_equal(stats.lse, call(target, function, stats=("lse",), **options)[1].lse, equal_nan=True)
    x, w, _ = arrays(dtype)
    source = (x, w) if function == "linear_log_probs" else (x @ w.T,)
    chunks = {"workspace": 5 * V * 4} if len(source) == 2 else {}

    def results(*given: mx.array) -> tuple[mx.array, list[mx.array]]:
        found = getattr(xent, function)(*given, mx.array(Y), backend=target.name, entropy=True, **chunks, **ASKED[name])
        return mx.where(mx.isinf(found[0]), 0, found[0]).sum() + found[1].sum(), list(found)

    (_, found), _ = mx.value_and_grad(results, argnums=tuple(range(len(source))))(*source)
    assert mx.array_equal(alone, found[0], equal_nan=True)
    assert mx.array_equal(entropy, found[1], equal_nan=True)


@pytest.mark.parametrize("converted", [1, 7 * D * 4, 2**25])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_never_rounded_to_16_bits(
    target: Target, dtype: mx.Dtype, converted: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of classes converted at a time. The gradient comes from the same logits."""
    monkeypatch.setattr(sources, "_CONVERTED_BYTES", converted)
    monkeypatch.setattr(sources, "_MOST_RANGES", 100)
    x, w, b = arrays(dtype)
    given = (x, w, b) if bias else (x, w)
    (upstream,) = target.arrays(RNG.normal(size=N))

    def loss(x: mx.array, w: mx.array, b: mx.array | None = None) -> tuple[mx.array, mx.array]:
        found = xent.linear_log_probs(x, w, mx.array(Y), linear_bias=b, workspace=5 * V * 4, backend=target.name)
        return (found * upstream).sum(), found

    (_, found), gradients = mx.value_and_grad(loss, argnums=tuple(range(len(given))))(*given)
    numbers = [wide(array) for array in given]
    options: dict[str, Any] = {"linear_bias": numbers[2] if bias else None}
    expected = xent.linear_log_probs(*numbers[:2], Y, **options)
    np.testing.assert_allclose(np.array(found), expected, atol=3e-6)
    for made, truth in zip(gradients, reference_gradients(numbers, -np.array(upstream)), strict=False):
        assert made.dtype == dtype
        unit = {mx.float32: 2.0**-20, mx.bfloat16: 2.0**-7, mx.float16: 2.0**-9}[dtype]
        np.testing.assert_allclose(wide(made), truth, rtol=0, atol=unit * np.abs(truth).max())


def reference_gradients(numbers: list[Any], upstream: Any, sampled: Any = None, **others: Any) -> tuple[Any, ...]:
    """Return the reference's gradients; `sampled` has the arguments that a loss does not have."""
    neutral: dict[str, Any] = {
        "ignore_index": -100, "softcap": None, "logit_scale": 1.0, "entropy": False, "stats": (), "shift": 0,
        "workspace": None, "temperature": 1.0, "support": None,
    }  # fmt: skip
    bias = numbers[2] if len(numbers) == 3 else None
    call = linear_log_probs_call(*numbers[:2], Y, linear_bias=bias, **neutral | (sampled or {}))
    return linear_cross_entropy_gradients(call, upstream, **others)


@pytest.mark.parametrize("workspace", [1, 5 * V * 4, None])
@pytest.mark.parametrize("names", [("log_probs",), ("entropy",), ("lse",), ("log_probs", "entropy", "lse")], ids=str)
def test_gradients_through_a_support(target: Target, names: tuple[str, ...], workspace: int | None) -> None:
    """In chunks of rows with many entries, few or none."""
    upstream = {name: RNG.normal(size=N) for name in names}
    x, w, b = arrays()

    def total(x: mx.array, w: mx.array, b: mx.array) -> mx.array:
        found, entropy, stats = xent.linear_log_probs(
            x, w, mx.array(Y), linear_bias=b, temperature=mx.array(T, mx.float32), support=ours(), entropy=True,
            stats=("lse",), workspace=workspace, backend=target.name,
        )  # fmt: skip
        results = {"log_probs": found, "entropy": entropy, "lse": stats.lse}
        finite = {name: mx.where(mx.isinf(value), 0, value) for name, value in results.items()}
        return sum((finite[name] * mx.array(given, mx.float32)).sum() for name, given in upstream.items())

    found = mx.grad(total, argnums=(0, 1, 2))(x, w, b)
    sampled = {"temperature": T, "support": SUPPORT}
    others = {name: given for name, given in upstream.items() if name != "log_probs"}
    expected = reference_gradients(
        [wide(x), wide(w), wide(b)], -upstream.get("log_probs", np.zeros(N)), sampled, **others
    )
    for made, truth in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(made), truth, rtol=0, atol=3e-6 * np.abs(truth).max())


@pytest.mark.parametrize("seed", range(4))
def test_many_classes(target: Target, seed: int) -> None:
    """So many classes that MLX's sums on a CPU would lose precision."""
    logits = np.random.default_rng(seed).normal(0, 3, (3, 33_003)).astype(np.float32)
    y = np.array([5, 0, 33_002])
    options: dict[str, Any] = {"entropy": True, "stats": LOG_PROB_STATS}
    *found, stats = xent.log_probs(mx.array(logits), mx.array(y), backend=target.name, **options)
    *expected, truth = xent.log_probs(logits, y, **options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(one), other, rtol=3e-6)
    for name in LOG_PROB_STATS:
        np.testing.assert_allclose(np.array(getattr(stats, name)), getattr(truth, name), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_a_quantized_classifier_are_float32(target: Target, form: dict[str, Any], dtype: mx.Dtype) -> None:
    """Its scales are not converted, and the unpacked weight is not rounded."""
    x, w, b = arrays(dtype)
    parts = mx.quantize(w, **form)
    weight = xent.QuantizedWeight(*parts, **({"biases": None} if len(parts) == 2 else {}), **form)
    expect_right_products(x, weight, **form)
    scales = [part if part.dtype == mx.uint8 else part.astype(mx.float32) for part in parts[1:]]
    unpacked = mx.dequantize(parts[0], *scales, **form)
    loss, gradient = mx.value_and_grad(
        lambda x: xent.linear_log_probs(x, weight, mx.array(Y), linear_bias=b, backend=target.name).sum()
    )(x)
    found = xent.linear_log_probs(x, weight, mx.array(Y), linear_bias=b, backend=target.name, entropy=True)
    numbers = [wide(array) for array in (x, unpacked, b)]
    expected = xent.linear_log_probs(*numbers[:2], Y, linear_bias=numbers[2], entropy=True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(one), other, atol=1e-5)
    np.testing.assert_allclose(loss.item(), expected[0].sum(), rtol=1e-5)
    truth = reference_gradients(numbers, np.full(N, -1.0))[0]
    unit = {4: 2.0**-18, 2: 2.0**-6}[dtype.size]
    np.testing.assert_allclose(wide(gradient), truth, rtol=0, atol=unit * np.abs(truth).max())


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_functions_have_the_same_results(target: Target, function: str, name: str) -> None:
    """The values of target, temperature and support are unknown during tracing."""
    x, w, _ = arrays()
    source = (x, w) if function == "linear_log_probs" else (x @ w.T,)
    chunks = {"workspace": 5 * V * 4} if len(source) == 2 else {}
    options = dict(ASKED[name])
    given = options.pop("support", None)
    temperature = mx.array(options.pop("temperature", 1.0))
    rows = mx.array(T, mx.float32)

    def loss(source: list[mx.array], y: mx.array, temperature: mx.array, parts: list[mx.array]) -> mx.array:
        allowed = xent.Support(*parts) if parts else None
        found, entropy, stats = getattr(xent, function)(
            *source, y, temperature=temperature, support=allowed, entropy=True, stats=("lse",), backend=target.name,
            **chunks, **options,
        )  # fmt: skip
        lse = mx.where(mx.isinf(stats.lse), 0, stats.lse)
        return (rows * mx.where(mx.isinf(found), 0, found) - 2 * entropy + mx.square(lse)).sum()

    step = mx.value_and_grad(loss)
    inputs = (list(source), mx.array(Y), temperature, [given.ids, given.offsets] if given else [])
    (one, grads), (other, expected) = mx.compile(step)(*inputs), step(*inputs)
    np.testing.assert_allclose(one.item(), other.item(), rtol=1e-6)
    for made, truth in zip(grads, expected, strict=True):
        np.testing.assert_allclose(np.array(made), np.array(truth), rtol=1e-5, atol=1e-6)


def test_new_temperature_retraces_nothing(target: Target) -> None:
    traces = []

    def results(x: mx.array, temperature: mx.array) -> mx.array:
        traces.append(temperature.shape)
        return xent.linear_log_probs(x, arrays()[1], mx.array(Y), temperature=temperature, backend=target.name)

    step = mx.compile(results)
    for value in (0.5, 0.7):
        expected = call(target, temperature=value)
        np.testing.assert_allclose(np.array(step(arrays()[0], mx.array(value))), np.array(expected), atol=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("supported", [False, True])
def test_temperature_that_is_not_positive(
    target: Target, function: str, wrong: float, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of such a row are NaN, and no others. Those of ignored rows are 0."""
    values = np.array(T)
    values[[0, 3, 7]] = wrong
    assert Y[3] == -100
    more = {"support": ours()} if supported else {}
    expected = call(target, function, temperature=mx.array(T, mx.float32), entropy=True, **more)
    found = call(target, function, temperature=mx.array(values, mx.float32), entropy=True, **more)
    wanted = np.isin(np.arange(N), [0, 7])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(np.array(one)), wanted)
        np.testing.assert_array_equal(np.array(one)[~wanted], np.array(other)[~wanted])
    gradients_are_nan(target, lambda function: function, mx.array(values, mx.float32), wanted, more)
    whole = np.array(call(target, function, temperature=mx.array(wrong), **more))
    np.testing.assert_array_equal(np.isnan(whole), Y != -100)
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    with pytest.raises(ValueError, match=r"temperature must be > 0 in every row, got (0\.0|-1\.0|nan) at \[0\]"):
        call(target, function, temperature=mx.array(values, mx.float32), **more)
    with pytest.raises(ValueError, match="temperature must be > 0 in every row"):
        call(target, function, temperature=mx.array(wrong), **more)


def gradients_are_nan(target: Target, wrap: Any, temperature: mx.array, wanted: Any, more: dict[str, Any]) -> None:
    def total(z: mx.array, temperature: mx.array) -> mx.array:
        found = xent.log_probs(z, mx.array(Y), temperature=temperature, entropy=True, backend=target.name, **more)
        return (found[0] + found[1]).sum()

    gradient = np.array(wrap(mx.grad(total))(call_logits(), temperature))
    np.testing.assert_array_equal(np.isnan(gradient).any(1), wanted)
    np.testing.assert_array_equal(np.isnan(gradient).all(1), wanted)
    assert not gradient[3].any()


@pytest.mark.parametrize("supported", [False, True])
def test_temperature_that_is_not_positive_in_a_compiled_function(target: Target, supported: bool) -> None:
    values = mx.array(np.where(np.isin(np.arange(N), [0, 3, 7]), -1.0, T), mx.float32)
    more = {"support": ours()} if supported else {}
    gradients_are_nan(target, mx.compile, values, np.isin(np.arange(N), [0, 7]), more)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("supported", [False, True])
def test_temperatures_that_are_huge_or_tiny(target: Target, softcap: float | None, supported: bool) -> None:
    """At an infinite temperature all classes have equal probabilities, at a tiny one only one class is left."""
    more = {"support": ours()} if supported else {}
    temperature = mx.array(np.where(np.arange(N) % 2, 1e-20, np.inf), mx.float32)
    log_probs, entropy = call(target, temperature=temperature, softcap=softcap, entropy=True, **more)
    counted = (np.arange(N) % 2 == 0) & (Y != -100)
    classes = SIZES if supported else np.full(N, V)
    inside = counted & (classes > 0) & ((np.arange(N) != 10) | (not supported))
    np.testing.assert_allclose(np.array(log_probs)[inside], -np.log(classes[inside]), rtol=1e-6)
    np.testing.assert_allclose(np.array(entropy)[inside], np.log(classes[inside]), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(np.array(entropy)[(np.arange(N) % 2 == 1)], 0)


OFFSETS = SUPPORT.offsets
WRONG_SUPPORTS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "begins late": (
        SUPPORT.ids,
        np.maximum(OFFSETS, 1),
        ValueError,
        r"must be non-decreasing from 0 to \d+, .* got 1 to",
    ),
    "ends early": (SUPPORT.ids, np.minimum(OFFSETS, OFFSETS[-1] - 1), ValueError, "must be non-decreasing from 0 to"),
    "ends late": (SUPPORT.ids[:-1], OFFSETS, ValueError, "must be non-decreasing from 0 to"),
    "falls": (SUPPORT.ids, np.where(np.arange(N + 1) == 4, 0, OFFSETS), ValueError, "and a decrease between"),
    "far away": (SUPPORT.ids, np.where(np.arange(N + 1) == 4, 2**40, OFFSETS), ValueError, "and a decrease between"),
    "no ids": (SUPPORT.ids[:0], OFFSETS, ValueError, "must be non-decreasing from 0 to 0"),
}


@pytest.mark.parametrize("name", WRONG_SUPPORTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_invalid_offsets(target: Target, function: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, offsets, error, message = WRONG_SUPPORTS[name]
    given = xent.Support(mx.array(ids), mx.array(offsets))
    *found, stats = call(target, function, support=given, entropy=True, stats=LOG_PROB_STATS)
    for values in (*found, stats.lse, stats.log_sum_sq_probs, stats.mean_logit):
        np.testing.assert_array_equal(np.isnan(np.array(values)), Y != -100)
    np.testing.assert_array_equal(np.isnan(gradient_of_logits(target, given)).all(1), Y != -100)
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    with pytest.raises(error, match=message):
        call(target, function, support=given)


def gradient_of_logits(target: Target, given: xent.Support) -> Any:
    def total(z: mx.array) -> mx.array:
        return xent.log_probs(z, mx.array(Y), support=given, backend=target.name).sum()

    return np.array(mx.grad(total)(call_logits()))


@pytest.mark.parametrize("wrong", [-1, V, 2**31 + 1, -(2**33)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_invalid_class_in_a_support(target: Target, function: str, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, row = SUPPORT.ids.copy(), 5
    place = OFFSETS[row] + 2
    ids[place] = wrong
    given = xent.Support(mx.array(ids), mx.array(OFFSETS))
    found = call(target, function, support=given, entropy=True)
    expected = call(target, function, support=ours(), entropy=True)
    for one, other in zip(found, expected, strict=True):
        one, other = np.array(one), np.array(other)
        np.testing.assert_array_equal(np.isnan(one), np.arange(N) == row)
        np.testing.assert_array_equal(one[np.arange(N) != row], other[np.arange(N) != row])
    np.testing.assert_array_equal(np.isnan(gradient_of_logits(target, given)).all(1), np.arange(N) == row)
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    with pytest.raises(IndexError, match=rf"support\.ids\[{place}\] is {wrong}; classes are 0 to {V - 1}"):
        call(target, function, support=given)


def test_duplicate_class_in_a_support(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = SUPPORT.ids.copy()
    ids[OFFSETS[5] + 1] = ids[OFFSETS[5] + 3]
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    with pytest.raises(ValueError, match=rf"row 5 has {ids[OFFSETS[5] + 1]} more than once"):
        call(target, support=xent.Support(mx.array(ids), mx.array(OFFSETS)))


def test_valid_values_pass_the_checks(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    for options in ASKED.values():
        call(target, **options)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_target_outside_its_support(target: Target, function: str) -> None:
    """Row 10 excludes its target. Rows 1, 4 and 11 are empty, and row 1 is not ignored."""
    *found, stats = call(target, function, support=ours(), entropy=True, stats=LOG_PROB_STATS)
    log_probs, entropy = map(np.array, found)
    outside = np.isin(np.arange(N), [1, 4, 10, 11]) & (Y != -100)
    np.testing.assert_array_equal(np.isneginf(log_probs), outside)
    np.testing.assert_array_equal(entropy == 0, np.isin(np.arange(N), [1, 2, 4, 9, 11]) | (Y == -100))
    assert np.isneginf(np.array(stats.lse)[[1, 4, 11]]).all()
    assert not gradient_of_logits(target, ours())[outside].any()


def test_support_without_ids(target: Target) -> None:
    given = xent.Support(mx.zeros((0,), mx.int64), mx.zeros((N + 1,), mx.int64))
    found, entropy = call(target, support=given, entropy=True)
    np.testing.assert_array_equal(np.array(found), np.where(Y == -100, 0, -np.inf))
    assert not entropy.any()
    assert not gradient_of_logits(target, given).any()


def test_support_with_a_shift_and_leading_axes(target: Target) -> None:
    """Supports belong to targets, like temperatures. Those of targets that no row uses are ignored."""
    x, w, _ = arrays()
    shape, shift = (3, 4), 2
    options = {"shift": shift, "entropy": True}
    found = xent.linear_log_probs(
        x.reshape(*shape, D), w, mx.array(Y.reshape(shape)), support=ours(), workspace=5 * V * 4,
        temperature=mx.array(T.reshape(shape), mx.float32), backend=target.name, **options,
    )  # fmt: skip
    expected = xent.linear_log_probs(
        wide(x).reshape(*shape, D), wide(w), Y.reshape(shape), support=SUPPORT, temperature=T.reshape(shape), **options
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(one), other, atol=3e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_logits_of_minus_infinity(target: Target, function: str) -> None:
    """Classes with a bias of -inf, inside and outside of a support."""
    bias = np.where(np.arange(V) % 4 == 1, -np.inf, 0.0)
    x, w, _ = arrays()
    y = np.where((Y % 4 == 1) & (Y != -100), 0, Y)
    for given in (None, SUPPORT):
        options: dict[str, Any] = {"entropy": True, "stats": ("lse", "log_sum_sq_probs", "mean_logit")}
        allowed = {"support": given}
        if function == "linear_log_probs":
            *found, stats = xent.linear_log_probs(
                x, w, mx.array(y), linear_bias=mx.array(bias, mx.float32), backend=target.name,
                support=ours() if given else None, **options,
            )  # fmt: skip
            *expected, truth = xent.linear_log_probs(wide(x), wide(w), y, linear_bias=bias, **allowed, **options)
        else:
            logits = x @ w.T + mx.array(bias, mx.float32)
            *found, stats = xent.log_probs(
                logits, mx.array(y), backend=target.name, support=ours() if given else None, **options
            )
            *expected, truth = xent.log_probs(wide(logits), y, **allowed, **options)
        for one, other in (*zip(found, expected, strict=True), *((getattr(stats, n), getattr(truth, n)) for n in
                           options["stats"])):  # fmt: skip
            np.testing.assert_allclose(np.array(one), other, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("options", [{}, {"support": True}], ids=str)
def test_one_class(target: Target, options: dict[str, Any]) -> None:
    more = {"support": xent.Support(mx.array([0, 0]), mx.array([0, 1, 1, 2]))} if options else {}
    logits, y = mx.array([[3.0], [-5.0], [0.5]]), mx.array([0, 0, -100])
    found, entropy, stats = xent.log_probs(
        logits, y, temperature=mx.array([2.0, 1.0, 1.0]), entropy=True, stats=LOG_PROB_STATS, backend=target.name,
        **more,
    )  # fmt: skip
    np.testing.assert_array_equal(np.array(found), [0, -np.inf if options else 0, 0])
    np.testing.assert_array_equal(np.array(stats.lse), [1.5, -np.inf if options else -5, 0])
    np.testing.assert_array_equal(np.array(stats.mean_logit), [1.5, 0 if options else -5, 0])
    assert not entropy.any()


@pytest.mark.parametrize("rows", [(0,), (3, 0)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_rows(target: Target, function: str, rows: tuple[int, ...]) -> None:
    _, w, _ = arrays()
    source = [mx.zeros((*rows, D)), w] if function == "linear_log_probs" else [mx.zeros((*rows, V))]
    given = xent.Support(mx.zeros((0,), mx.int64), mx.zeros((1,), mx.int64))

    def results(*source: mx.array) -> mx.array:
        found, entropy, stats = getattr(xent, function)(
            *source, mx.zeros(rows, mx.int32), temperature=mx.ones(rows), support=given, entropy=True,
            stats=LOG_PROB_STATS, backend=target.name,
        )  # fmt: skip
        assert found.shape == entropy.shape == rows
        assert {getattr(stats, name).shape for name in LOG_PROB_STATS} == {rows}
        return found.sum() + entropy.sum()

    for gradient in mx.grad(results, argnums=tuple(range(len(source))))(*source):
        assert not gradient.any()


def test_every_target_ignored(target: Target) -> None:
    x, w, _ = arrays()
    y = mx.full((N,), -100)
    temperature = mx.full((N,), mx.nan)

    def results(x: mx.array, w: mx.array) -> mx.array:
        found = xent.linear_log_probs(
            x, w, y, temperature=temperature, entropy=True, support=ours(), backend=target.name
        )
        return mx.stack(list(found))

    assert not results(x * mx.nan, w).any()
    for gradient in mx.grad(lambda *given: results(*given).sum(), argnums=(0, 1))(x * mx.nan, w):
        assert not gradient.any()


EACH = {
    "logits": call_logits(),
    "target": mx.array(Y),
    "temperature": mx.array(T, mx.float32),
    "ids": mx.array(SUPPORT.ids),
    "offsets": mx.array(SUPPORT.offsets),
}


def of_array(target: Target, name: str, result: int) -> Callable[[mx.array], mx.array]:
    def function(array: mx.array) -> mx.array:
        given = EACH | {name: array}
        return xent.log_probs(
            given["logits"], given["target"], temperature=given["temperature"], entropy=True, backend=target.name,
            support=xent.Support(given["ids"], given["offsets"]),
        )[result]  # fmt: skip

    return function


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("result", [0, 1])
def test_vmap_and_forward_mode_raise(target: Target, name: str, result: int) -> None:
    function = of_array(target, name, result)
    with pytest.raises(NotImplementedError, match=r"mx\.vmap cannot vectorise xent"):
        mx.eval(mx.vmap(function)(mx.stack([EACH[name]] * 2)))
    if name in ("logits", "temperature"):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            mx.eval(mx.jvp(function, [EACH[name]], [EACH[name]]))


@pytest.mark.parametrize("result", [0, 1])
def test_second_derivatives_raise_and_temperature_has_none(target: Target, result: int) -> None:
    function = of_array(target, "logits", result)
    finite = mx.array((Y != -100) & (SIZES > 0) & (np.arange(N) != 10))

    def total(z: mx.array) -> mx.array:
        return mx.where(finite, function(z), 0).sum()

    with pytest.raises(RuntimeError, match="no second derivatives"):
        mx.grad(lambda z: mx.grad(total)(z).sum())(EACH["logits"])
    gradient = mx.grad(lambda array: of_array(target, "temperature", result)(array).sum())(EACH["temperature"])
    assert not gradient.any()


def test_support_takes_no_memory_of_the_logits_size(target: Target) -> None:
    rows, vocabulary = 256, 20_000
    logits = mx.random.normal((rows, vocabulary)).astype(mx.bfloat16)
    ids, offsets = mx.random.randint(0, vocabulary, (rows * 8,)), mx.arange(0, rows * 8 + 1, 8)
    y = ids[::8] + 0
    mx.eval(logits, ids, offsets, y)
    given = xent.Support(ids, offsets)
    assert peak(lambda: xent.log_probs(logits, y, support=given, backend=target.name)) <= 0.1 * logits.nbytes
    step = mx.grad(lambda z: xent.log_probs(z, y, support=given, backend=target.name).sum())
    assert peak(lambda: step(logits)) <= 1.2 * logits.nbytes


@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_classifier_is_never_converted_as_a_whole(
    target: Target, supported: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_CONVERTED_BYTES", 2**16)
    monkeypatch.setattr(sources, "_MOST_RANGES", 1000)
    rows, width, vocabulary = 64, 512, 8192
    x, w = (
        mx.random.normal((rows, width)).astype(mx.bfloat16),
        mx.random.normal((vocabulary, width)).astype(mx.bfloat16),
    )
    y = mx.random.randint(0, vocabulary, (rows,))
    ids, offsets = mx.random.randint(0, vocabulary, (rows * 8,)), mx.arange(0, rows * 8 + 1, 8)
    mx.eval(x, w, y, ids, offsets)
    more = {"support": xent.Support(ids, offsets)} if supported else {}

    def results(x: mx.array) -> mx.array:
        found = xent.linear_log_probs(x, w, y, workspace=8 * vocabulary * 4, entropy=True, backend=target.name, **more)
        return found[1].sum()

    for function in (results, mx.grad(results)):
        step = mx.compile(function) if compiled else function
        assert peak(lambda step=step: step(x)) <= 0.4 * w.nbytes


def test_nothing_is_evaluated(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a support returns an unevaluated graph."""
    if target.name == "metal":
        return  # the emulator evaluates eagerly
    monkeypatch.setattr(mx, "eval", None)
    found = call(target, support=ours(), temperature=mx.array(T, mx.float32), entropy=True)
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *found)
    assert drawing.getvalue().count("Matmul") == -(-N // 5)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("option", ["logit_scale", "softcap"])
def test_scales_of_16_bits_are_divided_by_a_temperature_without_rounding(
    target: Target, option: str, dtype: mx.Dtype
) -> None:
    value = mx.array(1.3, dtype)

    def run(value: Any) -> mx.array:
        options: dict[str, Any] = {option: value, "temperature": 0.7, "backend": target.name}
        return xent.linear_log_probs(mx.array(X), mx.array(W), mx.array(Y), **options)

    assert mx.allclose(run(value), run(float(value)), rtol=1e-6, atol=1e-5)
