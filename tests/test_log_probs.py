"""The promises of the design that hold for log-probabilities on every backend, each with its own test."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import xent
from tests.calls import call_of
from tests.cases import LOG_PROBS
from tests.covering import crossed
from tests.targets import Target
from xent.core.check.cases import LOG_PROB_OPTIONS, Case, Inputs, make_inputs
from xent.core.spec import LOG_PROB_STATS

WITHOUT_SUPPORT = {"temperature": "rows", "softcap": 5.0, "logit_scale": 0.8}
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "rows": WITHOUT_SUPPORT, "support": LOG_PROB_OPTIONS["all"]}


def case_of(function: str, options: str, dtype: str = "float32", **more: Any) -> Case:
    shifted = {"bias": True, "shift": 2} if function == "linear_log_probs" and options != "plain" else {}
    case = Case(function, (2, 6), 67, dtype, options, OPTIONS[options], "none", entropy=True, stats=("lse",))
    return replace(case, **(shifted | more))


def upstream_of(target: Target, inputs: Inputs) -> tuple[Any, ...]:
    return target.arrays(inputs.upstream, *inputs.others.values())


def results(target: Target, case: Case, inputs: Inputs, only: tuple[int, ...] | None = None) -> list[Any]:
    """Return log-probabilities, entropy, lse, and the gradients of all that is differentiable or of `only` some."""
    call, arrays = call_of(target, case, inputs)
    chosen = range(len(arrays)) if only is None else only

    def of_some(*some: Any) -> Any:
        given = dict(zip(chosen, some, strict=True))
        returned = call(*(given.get(number, array) for number, array in enumerate(arrays)))
        return tuple(case.found_in(returned).values())

    found, gradients = target.harness.gradients(
        of_some, tuple(arrays[number] for number in chosen), upstream_of(target, inputs)
    )
    return [target.harness.numpy(array) for array in (*found, *gradients)]


def same(target: Target, one: Any, other: Any) -> None:
    np.testing.assert_array_equal(target.harness.numpy(one), target.harness.numpy(other))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("function", LOG_PROBS)
def test_inputs_are_never_written_to(target: Target, function: str, options: str) -> None:
    case = case_of(function, options)
    inputs = make_inputs(case)
    placed: list[Any] = []

    class Recording:
        def array(self, values: Any, dtype: str | None = None) -> Any:
            placed.append(target.harness.array(values, dtype))
            return placed[-1]

    recorded = replace(target)
    recorded.__dict__["harness"] = Recording()
    call, arrays = call_of(recorded, case, inputs)
    before = [target.harness.numpy(array).copy() for array in placed]
    assert len(placed) == len(arrays) + 1 + {"plain": 0, "rows": 1, "support": 3}[options]
    target.harness.gradients(
        lambda *given: tuple(case.found_in(call(*given)).values()), arrays, upstream_of(target, inputs)
    )
    for array, values in zip(placed, before, strict=True):
        np.testing.assert_array_equal(target.harness.numpy(array), values)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("function", LOG_PROBS)
def test_bitwise_the_same_run_after_run(target: Target, function: str, options: str) -> None:
    case = case_of(function, options)
    first, second = (results(target, case, make_inputs(case)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    *crossed(
        function=LOG_PROBS,
        dtype=["float32", "bfloat16", "float16"],
        options=OPTIONS,
        rows=[(2, 6), (70,)],
        workspace=[None, 20 * 600],
    )
)
def test_same_bits_whatever_is_asked_for(
    target: Target, function: str, dtype: str, options: str, rows: tuple[int, ...], workspace: int | None
) -> None:
    """With a gradient and without, with the entropy and without, with statistics and without."""
    loop = {"workspace": workspace} if function == "linear_log_probs" else {}
    case = target.sized(case_of(function, options, dtype, rows=rows, vocabulary=300, **loop))
    inputs = make_inputs(case)
    log_probs, entropy, lse, *_ = results(target, case, inputs)
    for asked in ({}, {"entropy": True}, {"stats": LOG_PROB_STATS}, {"entropy": True, "stats": ("lse",)}):
        call, arrays = call_of(target, case, inputs, **({"entropy": False, "stats": ()} | asked))
        returned = call(*arrays)
        found = returned if isinstance(returned, tuple) else (returned,)
        np.testing.assert_array_equal(target.harness.numpy(found[0]), log_probs)
        if "entropy" in asked:
            np.testing.assert_array_equal(target.harness.numpy(found[1]), entropy)
        if "stats" in asked:
            np.testing.assert_array_equal(target.harness.numpy(found[-1].lse), lse)
        (alone, *_), _ = target.harness.gradients(
            lambda *given, call=call: (first(call(*given)),), arrays, upstream_of(target, inputs)[:1]
        )
        np.testing.assert_array_equal(target.harness.numpy(alone), log_probs)


def first(returned: Any) -> Any:
    return returned[0] if isinstance(returned, tuple) else returned


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("function", LOG_PROBS)
def test_gradients_are_those_of_whoever_asks(target: Target, function: str, options: str) -> None:
    case = case_of(function, options)
    inputs = make_inputs(case)
    count = len(inputs.differentiable)
    every = results(target, case, inputs)[3:]
    for only in [(number,) for number in range(count)] + ([(0, 1)] if count == 3 else []):
        some = results(target, case, inputs, only)[3:]
        for number, gradient in zip(only, some, strict=True):
            np.testing.assert_allclose(gradient, every[number], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", OPTIONS)
def test_any_strides(target: Target, options: str) -> None:
    case = case_of("log_probs", options, rows=(3, 4))
    inputs = make_inputs(case)
    (logits,) = target.arrays(inputs.differentiable["logits"])
    call, _ = call_of(target, case, inputs)
    expected = tuple(case.found_in(call(logits)).values())
    turned, wide = target.arrays(
        inputs.differentiable["logits"].transpose(2, 0, 1), np.repeat(inputs.differentiable["logits"], 2, -1)
    )
    # Transposed, sliced, and with the classes on another axis.
    apart = turned.swapaxes(0, 1).swapaxes(1, 2)
    for strided, axis in ((apart, -1), (wide[..., ::2], -1), (logits.swapaxes(1, 2), 1)):
        moved, _ = call_of(target, case, inputs, axis=axis)
        for one, other in zip(expected, case.found_in(moved(strided)).values(), strict=True):
            np.testing.assert_allclose(
                target.harness.numpy(other), target.harness.numpy(one), rtol=2e-6, atol=2e-6, equal_nan=False
            )
    given = {"target": np.repeat(inputs.target, 2, -1)}
    if "temperature" in inputs.options:
        given["temperature"] = np.repeat(inputs.options["temperature"], 2, -1)
    sliced = {name: target.arrays(values)[0][:, ::2] for name, values in given.items()}
    for one, other in zip(
        expected, case.found_in(call_of(target, case, inputs, **sliced)[0](logits)).values(), strict=True
    ):
        same(target, one, other)


def test_strides_of_hidden_states_and_classifier(target: Target) -> None:
    case = case_of("linear_log_probs", "rows", bias=False)
    inputs = make_inputs(case)
    call, (hidden, weight) = call_of(target, case, inputs)
    expected = case.found_in(call(hidden, weight))
    turned, across = target.arrays(
        inputs.differentiable["input"].transpose(1, 0, 2), inputs.differentiable["linear_weight"].T
    )
    found = case.found_in(call(turned.swapaxes(0, 1), across.swapaxes(0, 1)))
    for name, values in expected.items():
        np.testing.assert_allclose(
            target.harness.numpy(found[name]), target.harness.numpy(values), rtol=2e-6, atol=2e-6
        )


@pytest.mark.parametrize("options", ["plain", "rows", "support"])
@pytest.mark.parametrize("function", LOG_PROBS)
def test_upstream_gradient_that_is_expanded(target: Target, function: str, options: str) -> None:
    """A sum sends back one number for all rows."""
    case = replace(case_of(function, options, ignored=0.0, shift=0), missing=("lse",))
    inputs = make_inputs(case)
    if "support" in inputs.options:  # a log-probability of -inf would leave no sum
        support = inputs.options["support"]
        support.ids[support.offsets[-2]] = inputs.target.ravel()[-1]
    call, arrays = call_of(target, case, inputs)
    ones = replace(
        inputs, upstream=np.ones(case.rows), others={"entropy": np.full(case.rows, 0.5), "lse": np.zeros(())}
    )

    def total(*given: Any) -> Any:
        log_probs, entropy, _ = call(*given)
        return log_probs.sum() + 0.5 * entropy.sum()

    _, expanded = target.harness.gradients(total, arrays, None)
    _, plain = target.harness.gradients(
        lambda *given: tuple(case.found_in(call(*given)).values()),
        arrays,
        (*target.arrays(ones.upstream, ones.others["entropy"]), None),
    )
    for one, other in zip(expanded, plain, strict=True):
        same(target, one, other)


@pytest.mark.parametrize("hidden", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("function", LOG_PROBS)
def test_nothing_of_an_ignored_row_is_felt(target: Target, function: str, options: str, hidden: float) -> None:
    case = case_of(function, options, rows=(6,), ignored=0.0, shift=0)
    clean, inputs = make_inputs(case), make_inputs(case)
    inputs.target[2] = clean.target[2] = -100
    next(iter(inputs.differentiable.values()))[2] = hidden
    for expected, found in zip(*(results(target, case, drawn) for drawn in (clean, inputs)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
        assert len(found) != 6 or (found[2] == 0).all()
    call, arrays = call_of(target, case, inputs, stats=LOG_PROB_STATS)
    *_, stats = call(*arrays)
    for name in LOG_PROB_STATS:
        assert target.harness.numpy(getattr(stats, name))[2] == (-1 if name == "predictions" else 0)


@pytest.mark.parametrize("rows", [(0,), (2, 0), (3, 4)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("function", LOG_PROBS)
def test_no_rows_and_no_targets(target: Target, function: str, options: str, rows: tuple[int, ...]) -> None:
    case = case_of(function, options, rows=rows, vocabulary=5, ignored=2.0)
    inputs = make_inputs(case)
    *found, _ = made = results(target, case, inputs)
    assert all(array.shape == rows for array in found[:3])
    for array, values in zip(made[3:], inputs.differentiable.values(), strict=True):
        assert array.shape == values.shape
    assert all((array == 0).all() for array in made)


@pytest.mark.parametrize("columns", [1, 3, 8])
@pytest.mark.parametrize("options", ["plain", "temperature"])
def test_leading_columns_of_minus_infinity(target: Target, options: str, columns: int) -> None:
    """A vocabulary that is masked in front: those classes have probability 0 and gradient 0."""
    case = Case("log_probs", (6,), 11, "float32", "", LOG_PROB_OPTIONS[options], "none", entropy=True, ignored=0.0)
    inputs = make_inputs(case)
    inputs.differentiable["logits"][:, :columns] = -np.inf
    inputs.target[:] = np.maximum(inputs.target, columns)
    inputs.target[0] = 0  # which cannot be
    call, (logits,) = call_of(target, case, inputs)
    expected = xent.log_probs(target.harness.numpy(logits), inputs.target, entropy=True, **inputs.options)
    for one, other in zip(call(logits), expected, strict=True):
        np.testing.assert_allclose(target.harness.numpy(one), other, rtol=3e-6, atol=1e-6)
    for upstream in (1, 0), (0, 1), (1, 1):
        given = target.arrays(*(np.full(6, float(factor)) for factor in upstream))
        _, (gradient,) = target.harness.gradients(call, (logits,), given)
        gradient = target.harness.numpy(gradient)
        assert np.isfinite(gradient).all()
        assert (gradient[1:, :columns] == 0).all()
        assert np.abs(gradient[:, columns:]).sum() > 0


def test_target_outside_its_support(target: Target) -> None:
    support = xent.Support(*target.arrays(np.array([0, 2, 1], np.int32), np.array([0, 2, 3, 3], np.int32)))
    logits, classes, ones = target.arrays(np.arange(9.0).reshape(3, 3), np.array([1, 1, 1]), np.ones(3))

    def call(given: Any) -> Any:
        return xent.log_probs(given, classes, support=support, entropy=True, backend=target.name)

    (log_probs, entropy), (gradient,) = target.harness.gradients(call, (logits,), (ones, None))
    np.testing.assert_array_equal(target.harness.numpy(log_probs), [-np.inf, 0.0, -np.inf])
    expected = xent.log_probs(np.array([[0.0, 2.0]]), np.array([0]), entropy=True)[1]
    np.testing.assert_allclose(target.harness.numpy(entropy), [*expected, 0.0, 0.0], rtol=1e-6)
    assert (target.harness.numpy(gradient) == 0).all()
    _, (gradient,) = target.harness.gradients(call, (logits,), (ones, ones))
    gradient = target.harness.numpy(gradient)
    assert (gradient[1:] == 0).all()
    assert (gradient[0] != 0).tolist() == [True, False, True]


def test_support_of_all_classes_is_none(target: Target) -> None:
    case = replace(case_of("log_probs", "rows"), stats=())
    inputs = make_inputs(case)
    ids = np.concatenate([np.random.default_rng(row).permutation(67) for row in range(12)])
    (ids, offsets) = target.arrays(ids, np.arange(13) * 67)
    plain, every = (call_of(target, case, inputs, support=support) for support in (None, xent.Support(ids, offsets)))
    found = [target.harness.gradients(call, arrays, upstream_of(target, inputs)) for call, arrays in (plain, every)]
    for one, other in zip((*found[0][0], *found[0][1]), (*found[1][0], *found[1][1]), strict=True):
        one, other = target.harness.numpy(one), target.harness.numpy(other)
        np.testing.assert_allclose(other, one, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("vocabulary", [2, 67, 4099, 33_003])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_does_not_depend_on_its_batch(target: Target, vocabulary: int, dtype: str) -> None:
    case = case_of("log_probs", "rows", dtype, rows=(9,), vocabulary=vocabulary, stats=LOG_PROB_STATS)
    inputs = make_inputs(replace(case, stats=()))
    call, (logits,) = call_of(target, case, inputs)
    classes, temperature = target.arrays(inputs.target, inputs.options["temperature"])
    whole = call(logits)
    for rows in (slice(4, 5), slice(3, 6), slice(0, 8)):
        part, _ = call_of(target, case, inputs, target=classes[rows], temperature=temperature[rows])
        some = part(logits[rows])
        for one, other in zip(whole[:2], some[:2], strict=True):
            same(target, one[rows], other)
        for name in LOG_PROB_STATS:
            same(target, getattr(whole[2], name)[rows], getattr(some[2], name))


@pytest.mark.parametrize("options", OPTIONS)
def test_shift_is_what_slicing_gives(target: Target, options: str) -> None:
    case = case_of("linear_log_probs", options, rows=(3, 5), vocabulary=21, shift=0)
    inputs = make_inputs(case)
    _, (hidden, *rest) = call_of(target, case, inputs)
    named = {"target": inputs.target} | {name: inputs.options[name] for name in {"temperature"} & inputs.options.keys()}
    for shift in (0, 1, 4, 5, 9):
        kept = max(5 - shift, 0)
        moved = {name: target.arrays(values[:, shift:])[0] for name, values in named.items()}
        if "support" in inputs.options:
            moved["support"] = of_rows(target, inputs.options["support"], np.arange(15).reshape(3, 5)[:, shift:])
        shifted = case.found_in(call_of(target, case, inputs, shift=shift)[0](hidden, *rest))
        sliced = case.found_in(call_of(target, case, inputs, **moved)[0](hidden[:, :kept], *rest))
        for name in case.results:
            found = target.harness.numpy(shifted[name])
            assert found.shape == (3, 5)
            assert (found[:, kept:] == 0).all()
            np.testing.assert_allclose(found[:, :kept], target.harness.numpy(sliced[name]), rtol=2e-6, atol=1e-6)


def of_rows(target: Target, support: xent.Support, rows: Any) -> xent.Support:
    """Return the support of some rows."""
    sets = [support.ids[support.offsets[row] : support.offsets[row + 1]] for row in rows.ravel()]
    ids = np.concatenate([np.zeros(0, np.int64), *sets])
    return xent.Support(*target.arrays(ids, np.cumsum([0, *map(len, sets)])))


@pytest.mark.parametrize("function", LOG_PROBS)
@pytest.mark.parametrize("wrong", ["target", "temperature", "support"])
def test_where_nothing_looks_the_row_is_nan(target: Target, function: str, wrong: str) -> None:
    """A target or a class of a support outside [0, V), a temperature that is not > 0: never read or written by."""
    case = case_of(function, "support", rows=(6,), vocabulary=9, ignored=0.0, shift=0, stats=())
    inputs = make_inputs(case)
    support = inputs.options["support"]
    if wrong == "target":
        inputs.target[1] = 2**40
    elif wrong == "temperature":
        inputs.options["temperature"][1] = -1.0
    else:
        support.ids[support.offsets[1]] = 2**40
    call, arrays = call_of(target, case, inputs)
    if target.looks_at_targets:
        with pytest.raises((IndexError, ValueError)):
            call(*arrays)
        return
    (log_probs, entropy), gradients = target.harness.gradients(call, arrays, upstream_of(target, inputs))
    bad = np.arange(6) == 1
    np.testing.assert_array_equal(np.isnan(target.harness.numpy(log_probs)), bad)
    assert np.isfinite(target.harness.numpy(entropy)[~bad]).all()
    gradient = target.harness.numpy(gradients[0])
    assert np.isnan(gradient[bad]).all()
    assert np.isfinite(gradient[~bad]).all()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("function", LOG_PROBS)
def test_second_backward_through_a_retained_graph_gives_the_same(target: Target, function: str, options: str) -> None:
    if target.backend.framework != "torch":
        return  # the others keep no graph
    import torch

    case = case_of(function, options)
    inputs = make_inputs(case)
    call, arrays = call_of(target, case, inputs)
    leaves = [array.requires_grad_() for array in arrays]
    found = tuple(case.found_in(call(*leaves)).values())
    upstream = upstream_of(target, inputs)
    first, second = (torch.autograd.grad(found, leaves, upstream, retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    # And apart, in any order: each gets the gradients of its own.
    apart = [torch.autograd.grad(found[i], leaves, upstream[i], retain_graph=True) for i in (2, 0, 1)]
    for whole, *parts in zip(first, *apart, strict=True):
        torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(found, leaves, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(grads[0].sum(), leaves)
