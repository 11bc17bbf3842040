"""One test per promise of the documentation, for log-probabilities on every backend."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import xent
from tests.calls import OPTIONS, WITHOUT_RANK, call_of, log_prob_case, results_of, upstream_of
from tests.cases import LOG_PROBS
from tests.covering import crossed
from tests.targets import Target
from xent.command.check.case import make_inputs


@pytest.mark.parametrize(
    *crossed(
        function=LOG_PROBS,
        dtype=["float32", "bfloat16", "float16"],
        options=OPTIONS,
        rows=[(2, 6), (70,)],
        vocabulary=[300, 8201],
        workspace=[None, 20 * 600],
    )
)
def test_same_bits_with_and_without_gradients_and_statistics(
    target: Target,
    function: str,
    dtype: str,
    options: str,
    rows: tuple[int, ...],
    vocabulary: int,
    workspace: int | None,
) -> None:
    """Results have the same bits with and without gradients, entropy and statistics."""
    loop = {"workspace": workspace} if function == "linear_log_probs" else {}
    case = target.sized(log_prob_case(function, options, dtype, rows=rows, vocabulary=vocabulary, **loop))
    inputs = make_inputs(case)
    log_probs, entropy, lse, *_ = results_of(target, case, inputs)
    for asked in ({}, {"entropy": True}, {"stats": WITHOUT_RANK}, {"entropy": True, "stats": ("lse",)}):
        call, arrays = call_of(target, case, inputs, **({"entropy": False, "stats": ()} | asked))
        returned = call(*arrays)
        found = returned if isinstance(returned, tuple) else (returned,)
        target.same(found[0], log_probs)
        if "entropy" in asked:
            target.same(found[1], entropy)
        if "stats" in asked:
            target.same(found[-1].lse, lse)
        (alone, *_), _ = target.harness.gradients(
            lambda *given, call=call: (first(call(*given)),), arrays, upstream_of(target, case, inputs)[:1]
        )
        target.same(alone, log_probs)


def first(returned: Any) -> Any:
    return returned[0] if isinstance(returned, tuple) else returned


def test_gradients_come_from_unrounded_logits(target: Target) -> None:
    """Logits near 30, rounded to bfloat16, would give errors of 6% and more in the gradients of the entropy."""
    generator = np.random.default_rng(0)
    drawn = 4 * generator.standard_normal((64, 64)), generator.standard_normal((512, 64))
    arrays, classes = target.arrays(*drawn, dtype="bfloat16"), target.arrays(np.arange(64))[0]
    upstream = generator.random(64)
    _, gradients = target.harness.gradients(
        lambda *given: (xent.linear_log_probs(*given, classes, entropy=True, backend=target.name)[1],),
        arrays,
        target.arrays(upstream, dtype="float32"),
    )
    hidden, weight = (target.harness.numpy(array).astype(np.float64) for array in arrays)
    logits = hidden @ weight.T
    log_p = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    p = np.exp(log_p)
    of_logits = -upstream[:, None] * p * (log_p - (p * log_p).sum(-1, keepdims=True))
    for found, expected in zip(gradients, (of_logits @ weight, of_logits.T @ hidden), strict=True):
        error = np.linalg.norm(target.harness.numpy(found) - expected) / np.linalg.norm(expected)
        assert error < 0.01


@pytest.mark.parametrize("options", OPTIONS)
def test_classes_on_another_axis(target: Target, options: str) -> None:
    case = log_prob_case("log_probs", options, rows=(3, 4))
    inputs = make_inputs(case)
    call, (logits,) = call_of(target, case, inputs)
    moved, _ = call_of(target, case, inputs, axis=1)
    found = case.results_in(moved(logits.swapaxes(1, 2)))
    for name, one in case.results_in(call(logits)).items():
        target.close(found[name], one, rtol=2e-6, atol=2e-6, equal_nan=False)


@contextmanager
def flushed(target: Target) -> Iterator[None]:
    """Flush denormal numbers to 0 on the CPU in PyTorch, as many GPUs do by default."""
    if target.backend.framework != "torch":
        yield
        return
    import torch

    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("softcap", [None, 3.0, 0.25, 1e38, 1.7e308])
@pytest.mark.parametrize("each_row", [False, True])
@pytest.mark.parametrize("function", ["log_probs", "linear_log_probs"])
def test_huge_temperature_gives_equal_probabilities(
    target: Target, softcap: float | None, each_row: bool, function: str
) -> None:
    logits = np.random.default_rng(0).normal(size=(5, 9))
    heat = np.array([np.inf, 3e38, 1e38, 1e37, np.inf]) if each_row else 1.7e308
    given, classes = target.arrays(logits, np.arange(5))
    more = target.arrays(np.eye(9)) if function == "linear_log_probs" else ()
    heat = target.arrays(heat)[0] if each_row else heat

    def run(*arrays: Any) -> Any:
        return getattr(xent, function)(
            *arrays, classes, temperature=heat, softcap=softcap, entropy=True, backend=target.name
        )

    with flushed(target):
        ones = target.arrays(np.ones(5))[0]
        results, gradients = target.harness.gradients(run, (given, *more), (ones, ones))
    log_probs, entropy = (target.harness.numpy(result) for result in results)
    np.testing.assert_allclose(log_probs, -np.log(9), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(9), rtol=1e-6)
    for gradient in gradients:
        target.close(gradient, 0, atol=1e-6)


@pytest.mark.parametrize("function", LOG_PROBS)
def test_tiny_temperature_leaves_one_class(target: Target, function: str) -> None:
    drawn = np.random.default_rng(0).normal(size=(5, 9))
    given, classes, heat = target.arrays(drawn, drawn.argmax(-1), np.full(5, 1e-20))
    arrays = (given, *target.arrays(np.eye(9))) if function == "linear_log_probs" else (given,)
    found = getattr(xent, function)(*arrays, classes, temperature=heat, entropy=True, backend=target.name)
    for values in found:
        target.same(values, 0)


@pytest.mark.parametrize("function", LOG_PROBS)
def test_temperature_of_one_array(target: Target, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(log_prob_case(function, "plain"), options={"softcap": 5.0})
    inputs = make_inputs(case)
    (heat,) = target.arrays(np.array(0.7))
    found = (results_of(target, case, inputs, temperature=temperature) for temperature in (heat, 0.7))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    wrong, arrays = call_of(target, case, inputs, temperature=heat * 0)
    if not target.looks_at_targets:
        target.same(np.isnan(target.harness.numpy(wrong(*arrays)[0])), inputs.target != -100)
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    with pytest.raises(ValueError, match="temperature must be > 0 in every row"):
        wrong(*arrays)


@pytest.mark.parametrize("checked", ["0", "1"])
@pytest.mark.parametrize("function", LOG_PROBS)
def test_temperature_of_a_row_without_a_target_is_not_used(
    target: Target, function: str, checked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding often has the temperature 0. A temperature belongs to the target at its place, also with a shift."""
    monkeypatch.setenv("XENT_CHECK_TARGETS", checked)
    case = log_prob_case(function, "rows")
    inputs = make_inputs(case)
    heat, unused = inputs.options["temperature"], inputs.target == -100
    unused[..., : case.shift] = True
    assert unused[..., case.shift :].any()
    wrong = np.where(unused, np.resize([0.0, -1.0, np.nan], heat.shape), heat)
    pairs = zip(
        *(results_of(target, case, inputs, temperature=target.arrays(one)[0]) for one in (wrong, heat)), strict=True
    )
    for found, expected in pairs:
        target.same(found, expected)
    arguments = inputs.differentiable | inputs.options | case.keywords | {"target": inputs.target}
    found, expected = (getattr(xent, function)(**arguments | {"temperature": one}) for one in (wrong, heat))
    np.testing.assert_array_equal(found[:2], expected[:2])
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    place = np.argwhere(~unused)[-1]
    wrong[tuple(place)] = 0
    message = re.escape(f"temperature must be > 0 in every row, got 0.0 at {place.tolist()}")
    with pytest.raises(ValueError, match=message):
        results_of(target, case, inputs, temperature=target.arrays(wrong)[0])
    with pytest.raises(ValueError, match=message):
        getattr(xent, function)(**arguments | {"temperature": wrong})


def test_huge_temperature_gives_zero_divergence(target: Target) -> None:
    student, teacher = target.arrays(*np.random.default_rng(0).normal(size=(2, 5, 9)))
    with flushed(target):
        found = xent.divergence(student, teacher, temperature=1.7e308, softcap=3.0, backend=target.name)
    target.close(found, 0, atol=1e-6)


def test_huge_softcap_at_a_low_temperature(target: Target) -> None:
    """Their quotient is no float32 number."""
    logits, classes = target.arrays(1e-11 * np.random.default_rng(0).normal(size=(5, 9)), np.arange(5))
    options = {"temperature": 1e-10, "backend": target.name}
    found, expected = (xent.log_probs(logits, classes, **options, **more) for more in ({"softcap": 1e30}, {}))
    target.close(found, expected, rtol=1e-5)


@pytest.mark.parametrize("softcap", [1e30, 3e38, 1.7e308])
@pytest.mark.parametrize("kind", ["number", "array"])
@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
def test_huge_softcap_has_no_effect(target: Target, softcap: float, kind: str, function: str) -> None:
    given, classes = target.arrays(np.random.default_rng(0).normal(size=(5, 9)), np.arange(5))
    more = target.arrays(np.eye(9)) if function == "linear_cross_entropy" else ()
    cap = target.arrays(np.array(min(softcap, 3e38)))[0] if kind == "array" else softcap

    def gradients(**options: Any) -> Any:
        def run(*arrays: Any) -> Any:
            return getattr(xent, function)(*arrays, classes, logit_scale=0.5, backend=target.name, **options)

        return target.harness.gradients(run, (given, *more), None)

    expected = gradients()
    with flushed(target):
        found = gradients(softcap=cap)
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        target.close(one, other, rtol=1e-5, atol=1e-7)
