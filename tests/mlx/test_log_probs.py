"""Log-probabilities in MLX, beyond the matrix: converted classifiers, transformations, and memory."""

import io
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.cases import LOG_PROBS, paired_cases
from tests.mlx.test_work import peak
from tests.options import LOG_PROB_OPTIONS
from tests.targets import Target
from tests.test_gradients import passes
from xent.backends.mlx import sources
from xent.command.check.case import Case, make_inputs, placed
from xent.core.spec import LOG_PROB_STATS

N, D, V = 12, 64, 40
CASE = Case("log_probs", (N,), V, "float32", "", LOG_PROB_OPTIONS["all"], "none", hidden=D)


def drawn(target: Target, **more: Any) -> dict[str, Any]:
    """Return the arguments of a call whose rows have temperatures and supports, on the device."""
    inputs = make_inputs(CASE)
    named = inputs.differentiable | inputs.options | {"target": inputs.target, "backend": target.name} | more
    return placed(target.harness, named, "float32")


def linear(target: Target, dtype: mx.Dtype = mx.float32, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    x, w = (mx.array(rng.normal(size=(size, D)) / D**0.25, mx.float32).astype(dtype) for size in (N, V))
    given = drawn(target, workspace=5 * V * 4, **more)
    del given["logits"]
    return given | {"input": x, "linear_weight": w}


@pytest.mark.parametrize("converted", [1, 7 * 24 * 4, 2**25])
def test_logits_are_never_rounded_to_16_bits(target: Target, converted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of classes that are converted at a time. The gradient comes from the same logits."""
    monkeypatch.setattr(sources, "_CONVERTED_BYTES", converted)
    monkeypatch.setattr(sources, "_MOST_RANGES", 100)
    for dtype in ("bfloat16", "float16"):
        for case in paired_cases("linear_log_probs", (dtype,))[:: 4 if target.slow else 1]:
            passes(target, case)


@pytest.mark.parametrize("wrong", [-1.0, 0.5])
def test_a_compiled_function_takes_any_temperature_without_a_new_trace(target: Target, wrong: float) -> None:
    """Rows whose temperature is not positive are NaN."""
    traces = []

    def results(temperature: mx.array) -> mx.array:
        traces.append(temperature.shape)
        return xent.linear_log_probs(**linear(target, support=None) | {"temperature": temperature})

    step = mx.compile(results)
    for value in (0.7, wrong):
        heat = mx.array(np.where(np.arange(N) == 5, value, 0.7).astype(np.float32))
        found, expected = np.array(step(heat)), np.array(results(heat))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert np.isnan(found).sum() == (value < 0)
    assert len(traces) == 3


@pytest.mark.parametrize("function", LOG_PROBS)
def test_invalid_offsets_give_nan_in_every_row(target: Target, function: str) -> None:
    given = drawn(target) if function == "log_probs" else linear(target)
    ids, offsets = (np.array(part) for part in (given["support"].ids, given["support"].offsets))
    place = np.arange(N + 1)
    for wrong in (
        np.maximum(offsets, 1),
        np.minimum(offsets, offsets[-1] - 1),
        np.where(place == 4, offsets[3] - 1, offsets),
        np.where(place == 4, 2**40, offsets),
    ):
        given["support"] = xent.Support(mx.array(ids), mx.array(wrong))
        *found, stats = getattr(xent, function)(**given, entropy=True, stats=LOG_PROB_STATS)
        for values in (*found, stats.lse, stats.log_sum_sq_probs, stats.mean_logit):
            np.testing.assert_array_equal(np.isnan(np.array(values)), np.array(given["target"]) != -100)


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
    rows, width, vocabulary = 16, 512, 8192
    x, w = (mx.random.normal((size, width)).astype(mx.bfloat16) for size in (rows, vocabulary))
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
    given = linear(target)
    monkeypatch.setattr(mx, "eval", None)
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *xent.linear_log_probs(**given, entropy=True))
    assert drawing.getvalue().count("Matmul") == -(-N // 5)
