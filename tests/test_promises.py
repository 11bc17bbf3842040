"""One test per promise of the documentation, on every backend."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import xent
from tests.calls import OPTIONS, PROMISED, call_of, log_prob_case, results_of, upstream_of
from tests.cases import EVERYWHERE, FUNCTIONS, LOG_PROBS
from tests.covering import FULL, SLOW, crossed
from tests.options import LOG_PROB_OPTIONS
from tests.targets import Target
from xent.command.check.case import Case, make_inputs
from xent.core.spec import LOG_PROB_STATS, ROW_STATS


@pytest.mark.parametrize("case", PROMISED, ids=str)
def test_inputs_are_never_written_to(target: Target, case: Case) -> None:
    inputs = make_inputs(target.sized(case))
    placed = []

    class Recording:
        def array(self, values: Any, dtype: str | None = None) -> Any:
            placed.append(target.harness.array(values, dtype))
            return placed[-1]

    recorded = replace(target)
    recorded.__dict__["harness"] = Recording()
    call, arrays = call_of(recorded, case, inputs)
    before = [target.harness.numpy(array).copy() for array in placed]
    assert len(placed) > len(arrays)
    target.harness.gradients(
        lambda *given: tuple(case.results_in(call(*given)).values()), arrays, upstream_of(target, case, inputs)
    )
    for array, values in zip(placed, before, strict=True):
        target.same(array, values)


@pytest.mark.parametrize("case", PROMISED, ids=str)
def test_bitwise_the_same_run_after_run(target: Target, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if valid values are checked."""
    inputs = make_inputs(target.sized(case))
    first = results_of(target, case, inputs)
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    for one, other in zip(first, results_of(target, case, inputs), strict=True):
        np.testing.assert_array_equal(one, other)


LAYOUTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "first and last axis swapped": (lambda a: np.swapaxes(a, 0, -1), lambda a: a.swapaxes(0, -1)),
    "last axes swapped": (lambda a: np.swapaxes(a, 1 % a.ndim, -1), lambda a: a.swapaxes(1 % a.ndim, -1)),
    "every other column": (lambda a: np.repeat(a, 2, -1), lambda a: a[..., ::2]),
    "every other row": (lambda a: np.repeat(a, 2, 0), lambda a: a[::2]),
    "padded columns": (lambda a: np.concatenate([a, a], -1), lambda a: a[..., a.shape[-1] // 2 :]),
    "later rows": (lambda a: np.concatenate([a[:1], a]), lambda a: a[1:]),
}
"""What lies in memory, and how it is viewed."""


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        (layout, case)
        for place, layout in enumerate(LAYOUTS)
        for number, case in enumerate(PROMISED)
        if FULL or (place + number) % (6 if SLOW else 2) == 0
    ],
    ids=str,
)
def test_any_strides(target: Target, layout: str, case: Case) -> None:
    """Of every array of the call."""
    case = target.sized(case)
    inputs, (stored, viewed) = make_inputs(case), LAYOUTS[layout]

    class Strided:
        def array(self, values: Any, dtype: str | None = None) -> Any:
            values = np.asarray(values)
            if not values.ndim:
                return target.harness.array(values, dtype)
            made = viewed(target.harness.array(np.ascontiguousarray(stored(values)), dtype))
            target.same(made, target.harness.array(values, dtype))
            return made

    turned = replace(target)
    turned.__dict__["harness"] = Strided()
    call, arrays = call_of(turned, case, inputs)
    results, gradients = target.harness.gradients(
        lambda *given: tuple(case.results_in(call(*given)).values()), arrays, upstream_of(turned, case, inputs)
    )
    for found, expected in zip((*results, *gradients), results_of(target, case, inputs), strict=True):
        target.close(found, expected, rtol=2e-6, atol=1e-6, equal_nan=False)


@pytest.mark.parametrize("case", PROMISED, ids=str)
def test_gradients_exist_only_for_inputs_that_require_one(target: Target, case: Case) -> None:
    inputs = make_inputs(target.sized(case))
    results, count = len(case.results), len(inputs.differentiable)
    every = results_of(target, case, inputs)[results:]
    for only in [(number,) for number in range(count)] + ([(0, 1)] if count == 3 else []):
        some = results_of(target, case, inputs, only)[results:]
        for number, gradient in zip(only, some, strict=True):
            np.testing.assert_allclose(gradient, every[number], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", PROMISED, ids=str)
def test_second_backward_gives_the_same_gradients(target: Target, case: Case) -> None:
    if target.backend.framework != "torch":
        return  # other frameworks have no retained graph
    import torch

    inputs = make_inputs(target.sized(case))
    call, arrays = call_of(target, case, inputs)
    leaves = [array.requires_grad_() for array in arrays]
    found = tuple(case.results_in(call(*leaves)).values())
    upstream = upstream_of(target, case, inputs)
    first, second = (torch.autograd.grad(found, leaves, upstream, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    # Backward passes of single results, in any order, give the gradients of that result.
    order = [*range(2, len(found)), *range(len(found))][: len(found)]
    apart = [torch.autograd.grad(found[i], leaves, upstream[i], retain_graph=True) for i in order]
    for whole, *parts in zip(first, *apart, strict=True):
        torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(found, leaves, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(grads[0].sum(), leaves)


@pytest.mark.parametrize(
    *crossed(
        function=["cross_entropy", "log_probs"],
        vocabulary=[1, 2, 67, 4099, 33_003, 70_001],
        dtype=["float32", "bfloat16"],
        plain=[True, False],
    )
)
def test_row_does_not_depend_on_its_batch(
    target: Target, function: str, vocabulary: int, dtype: str, plain: bool
) -> None:
    is_loss = function == "cross_entropy"
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0} if is_loss else OPTIONS["rows"]
    case = Case(function, (9,), vocabulary, dtype, "", {} if plain else options, "none", ignored=0.0, entropy=True)
    inputs, names = make_inputs(case), ("lse", "nll", "entropy") if is_loss else LOG_PROB_STATS
    given = {"target": inputs.target, "temperature": inputs.options.get("temperature")}
    placed = {name: target.arrays(values)[0] for name, values in given.items() if values is not None}

    def results(rows: slice) -> list[Any]:
        some = {name: values[rows] for name, values in placed.items()}
        call, (logits,) = call_of(target, case, inputs, stats=names, **some)
        *first, stats = call(logits[rows])
        return [*first, *(getattr(stats, name) for name in names)]

    whole = results(slice(0, 9))
    for rows in (slice(4, 5), slice(3, 6), slice(0, 8)):
        for one, other in zip(whole, results(rows), strict=True):
            target.same(one[rows], other)


@pytest.mark.parametrize(*crossed(dtype=EVERYWHERE, vocabulary=[64, 67, 4104, 8201], offset=[0, 1, 3, 8]))
def test_row_does_not_depend_on_its_address(target: Target, dtype: str, vocabulary: int, offset: int) -> None:
    """Kernels read rows that do not begin at a multiple of 16 bytes in another way, and sum them in the same order.

    Triton's do so for rows of one call: if all of them begin at such multiples, the call is another kernel's. So is a
    gradient in memory that begins at another offset from such a multiple: it is written element by element.
    """
    if target.name == "triton" and vocabulary % 8 == 0:
        return
    apart = target.name == "triton" and target.device == "cuda" and dtype == "float32" and offset % 4
    values = np.random.default_rng(0).normal(0, 2, 5 * vocabulary + offset)
    flat, copied = target.arrays(values, values[offset:].reshape(5, vocabulary), dtype=dtype)
    (classes,) = target.arrays(np.arange(5))
    options = {"label_smoothing": 0.1, "stats": ROW_STATS, "backend": target.name}
    found, expected = (
        [*target.harness.gradients(lambda z: xent.cross_entropy(z, classes, **options)[0], (logits,), None)[1],
         *(getattr(xent.cross_entropy(logits, classes, **options)[1], name) for name in ROW_STATS)]
        for logits in (flat[offset:].reshape(5, vocabulary), copied)
    )  # fmt: skip
    gradient, *stats = zip(found, expected, strict=True)
    target.close(*gradient, **({"rtol": 2.0**-21, "atol": 1e-9} if apart else {"rtol": 0, "atol": 0}))
    for pair in stats:
        target.same(*pair)


IGNORING = [
    Case(function, (6,), 9, "float32", "", {}, reduction, stats=stats, missing=stats, workspace=3 * 9 * 4)
    for function in FUNCTIONS
    for reduction, stats in (
        ("mean", ()), ("sum", ("count",)), ("none", ("lse", "z_loss")), ("mean", ("lse", "z_loss")), ("none", ()),
    )
] + [log_prob_case(function, options, rows=(6,), shift=0) for function in LOG_PROBS for options in OPTIONS]  # fmt: skip


@pytest.mark.parametrize("case", IGNORING, ids=str)
@pytest.mark.parametrize("hidden", [np.nan, np.inf, -np.inf])
def test_values_of_ignored_rows_have_no_effect(target: Target, case: Case, hidden: float) -> None:
    case, is_loss = replace(case, ignored=0.0), case.function in FUNCTIONS
    names = (*case.results, *make_inputs(case).differentiable)
    for how in ("ignore_index", "sample_weight")[: 1 + is_loss]:
        clean, inputs = make_inputs(case), make_inputs(case)
        for drawn in (clean, inputs):
            if how == "ignore_index":
                drawn.target[2] = -100
            else:
                drawn.options["sample_weight"] = np.array([1.0, 2.0, 0.0, 1.0, 0.5, 1.0])
        next(iter(inputs.differentiable.values()))[2] = hidden
        expected, found = (dict(zip(names, results_of(target, case, one), strict=True)) for one in (clean, inputs))
        assert (found[names[len(case.results)]][2] == 0).all()
        for name in names:
            if name == "lse":  # that of a row with weight 0 is computed
                found[name][2] = expected[name][2]
            # Not bit for bit: exp of a vector register that also holds a NaN may round its other lanes differently.
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7)
        if how == "ignore_index":
            stats = ROW_STATS if is_loss else LOG_PROB_STATS
            call, arrays = call_of(target, case, inputs, stats=stats)
            *_, reported = call(*arrays)
            for name in stats:
                assert target.harness.numpy(getattr(reported, name))[2] == (
                    -1 if name in ("predictions", "rank") else 0
                )


NO_ROWS: list[dict[str, Any]] = [{"ignored": 2.0}, {"rows": (0,)}, {"rows": (2, 0)}]
ZEROS: list[dict[str, Any]] = [
    {"normalizer": 0.0},
    {"normalizer": "zero"},
    {"weight": "zero"},
    {"sample_weight": "zero"},
]
NOTHING = [
    replace(Case(function, (4,), 5, "float32", "", {}, reduction), **nothing)
    for function in FUNCTIONS
    for reduction in ("mean", "sum", "none")
    for nothing in (*NO_ROWS, *({"options": zero} for zero in ZEROS))
    if reduction == "mean" or "normalizer" not in str(nothing)
] + [
    log_prob_case(function, options, vocabulary=5, **nothing)
    for function in LOG_PROBS
    for options in OPTIONS
    for nothing in NO_ROWS
]


@pytest.mark.parametrize("case", NOTHING, ids=str)
def test_nothing_to_average_is_zero_with_zero_gradients(target: Target, case: Case) -> None:
    if "zero" in case.options.values():
        (name,) = case.options
        drawn = make_inputs(replace(case, options={}))
        drawn.options[name] = np.zeros({"weight": (5,), "sample_weight": (4,), "normalizer": ()}[name])
    else:
        drawn = make_inputs(case)
    if case.reduction == "mean" or case.options != {"weight": "zero"}:
        # If all class weights are 0, a sum or a row is 0 times its value.
        next(iter(drawn.differentiable.values()))[:1] = np.nan
    if 0 in case.rows:  # a call with rows has the same signature, and comes first
        results_of(target, case, make_inputs(replace(case, rows=(2, 3))))
    found = results_of(target, case, drawn)
    shapes = [case.rows if case.reduction == "none" else ()] * len(case.results)
    shapes += [values.shape for values in drawn.differentiable.values()]
    for array, shape in zip(found, shapes, strict=True):
        assert array.shape == shape
        assert (array == 0).all()


WITH_COLUMNS = [
    *(("cross_entropy", options) for options in ({}, {"z_loss": 0.1}, {"weight": True}, {"probabilities": True})),
    ("cross_entropy", {"weight": True, "label_smoothing": 0.1}),
    *((name, LOG_PROB_OPTIONS[options]) for name in LOG_PROBS for options in ("plain", "temperature", "support")),
]


@pytest.mark.parametrize(("function", "options"), WITH_COLUMNS, ids=str)
@pytest.mark.parametrize("columns", [1, 3, 8])
def test_leading_columns_of_minus_infinity(
    target: Target, function: str, options: dict[str, Any], columns: int
) -> None:
    """Classes with a logit or a bias of -inf (a padded or masked vocabulary) have probability 0 and gradient 0."""
    is_loss, linear = function in FUNCTIONS, function == "linear_log_probs"
    case = Case(function, (6,), 11, "float32", "", options, "none", entropy=True, ignored=0.0, bias=linear)
    inputs = make_inputs(case)
    *_, last = inputs.differentiable.values()
    last[..., :columns] = -np.inf
    if "probabilities" in options:
        inputs.target[:, :columns] = 0.0
    else:
        inputs.target[:] = np.maximum(inputs.target, columns)
    if "weight" in inputs.options:
        inputs.options["weight"] += 0.1
        inputs.options["weight"][:columns] = 0.0
    if "support" in inputs.options:  # all classes but the last
        inputs.options["support"] = xent.Support(np.tile(np.arange(10), 6), np.arange(7) * 10)
    if not is_loss:
        inputs.target[0] = 0  # -inf: an impossible target
    stats = ("lse", "log_sum_sq_probs", "mean_logit")
    call, arrays = call_of(target, case, inputs, stats=stats)
    numbers = dict(zip(inputs.differentiable, map(target.harness.numpy, arrays), strict=True))
    keywords = case.keywords | {"stats": stats} | inputs.options
    *expected, truth = getattr(xent, function)(**numbers, target=inputs.target, **keywords)
    *found, reported = call(*arrays)
    pairs = [*zip(found, expected, strict=True), *((getattr(reported, n), getattr(truth, n)) for n in stats)]
    for one, other in pairs:
        target.close(one, other, rtol=3e-6, atol=3e-6)
    for upstream in [(1,)] if is_loss else [(1, 0), (0, 1), (1, 1)]:
        given = target.arrays(*(np.full(6, float(factor)) for factor in upstream))
        _, gradients = target.harness.gradients(lambda *some: call(*some)[:-1], arrays, given)
        gradients = [target.harness.numpy(gradient) for gradient in gradients]
        assert all(np.isfinite(gradient).all() for gradient in gradients)
        assert linear or (gradients[-1][not is_loss :, :columns] == 0).all()
        assert np.abs(gradients[-1][..., columns:]).sum() > 0


def test_row_of_minus_infinity(target: Target) -> None:
    """A row of -inf has no probabilities, but its log-sum-exp is log 0, as in every framework's own logsumexp."""
    values = np.array([[-np.inf, -np.inf, -np.inf], [0.0, 1.0, 2.0]])
    logits, classes = target.arrays(values, np.array([1, 1]))
    loss, stats = xent.cross_entropy(logits, classes, reduction="none", stats=("lse", "nll"), backend=target.name)
    _, reference = xent.cross_entropy(values, np.array([1, 1]), stats=("lse",))
    lse, nll = target.harness.numpy(stats.lse), target.harness.numpy(stats.nll)
    assert lse[0] == reference.lse[0] == -np.inf
    assert np.isnan(nll[0])
    np.testing.assert_allclose(lse, reference.lse, rtol=1e-6)
    np.testing.assert_allclose(lse[1], np.log(np.exp(values[1]).sum()), rtol=1e-6)
    np.testing.assert_array_equal(np.isnan(target.harness.numpy(loss)), [True, False])


@pytest.mark.parametrize(
    *crossed(
        dtype=["float32", "bfloat16", "float16"],
        vocabulary=[38, 9001],
        value=[np.nan, np.inf],
        place=[0, 3, 7, 31, 37],
        options=[{}, {"label_smoothing": 0.1, "z_loss": 0.1, "logit_scale": 0.5}],
        reduction=["sum", "none"],
    )
)
def test_nan_and_infinity_affect_only_their_row(
    target: Target, dtype: str, vocabulary: int, value: float, place: int, options: dict[str, Any], reduction: str
) -> None:
    values = np.random.default_rng(1).normal(size=(3, vocabulary))
    found = []
    for spoilt in (False, True):
        if spoilt:
            values[1, place] = value
        logits, classes = target.arrays(values, np.array([3, 3, 3]), dtype=dtype)
        (ones,) = target.arrays(np.ones(3 if reduction == "none" else ()))
        loss, (gradient,) = target.harness.gradients(
            lambda z, y=classes: xent.cross_entropy(z, y, reduction=reduction, backend=target.name, **options),
            (logits,),
            ones,
        )
        found.append([target.harness.numpy(loss), target.harness.numpy(gradient)])
    (expected, right), (loss, gradient) = found
    np.testing.assert_array_equal(np.isnan(loss), np.arange(3) == 1 if reduction == "none" else True)
    assert np.isnan(gradient[1]).any()
    # Not bit for bit: exp of a vector register that also holds a NaN may round its other lanes differently.
    np.testing.assert_allclose(gradient[::2], right[::2], rtol=1e-5, atol=1e-7)
    if reduction == "none":
        np.testing.assert_allclose(loss[::2], expected[::2], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("biased", [False, True])
def test_hidden_states_of_width_0(target: Target, biased: bool, dtype: str) -> None:
    """Their logits are 0, or the bias."""
    bias, classes = np.random.default_rng(0).normal(size=7) * biased, np.array([1, -100, 6, 0, 3])
    arrays = target.arrays(np.zeros((5, 0)), np.zeros((7, 0)), *[bias] * biased, dtype=dtype)
    (ids,), (weight,) = target.arrays(classes), target.arrays(np.ones((7, 3)), dtype=dtype)
    (logits,) = target.arrays(np.broadcast_to(target.numbers(arrays[-1]) if biased else 0.0, (5, 7)) * 1.0)

    def run(function: str, *given: Any, **more: Any) -> Any:
        named = dict(zip(("input", "linear_weight", "linear_bias"), given, strict=False))
        return getattr(xent, function)(**named, **more, backend=target.name)

    (one,) = target.arrays(np.ones(()))
    options = {"target": ids, "z_loss": 0.1}
    (loss,), gradients = target.harness.gradients(
        lambda *given: (run("linear_cross_entropy", *given, **options),), arrays, (one,)
    )
    (expected,), (of_logits,) = target.harness.gradients(
        lambda given: (xent.cross_entropy(given, ids, z_loss=0.1, backend=target.name),), (logits,), (one,)
    )
    target.close(loss, expected, rtol=1e-6)
    assert [tuple(one.shape) for one in gradients[:2]] == [(5, 0), (7, 0)]
    if biased:
        close = {"rtol": 1e-2, "atol": 1e-3} if dtype != "float32" else {"rtol": 1e-5, "atol": 1e-7}
        target.close(gradients[2], target.numbers(of_logits).sum(0), **close)
    target.close(
        run("linear_log_probs", *arrays, target=ids), xent.log_probs(logits, ids, backend=target.name), rtol=1e-5
    )
    student, teacher = target.arrays(np.ones((5, 3)), dtype=dtype)[0], xent.LinearTeacher(*arrays)
    found = xent.linear_divergence(student, weight, teacher, backend=target.name)
    target.close(found, xent.divergence(logits * 0, logits, backend=target.name), rtol=1e-5, atol=1e-6)


def test_impossible_target_has_infinite_loss_and_finite_gradient(target: Target) -> None:
    values = np.array([[0.0, -np.inf, 1.0], [0.0, 1.0, 2.0]])
    logits, classes = target.arrays(values, np.array([1, 1]))
    loss, (gradient,) = target.harness.gradients(
        lambda z: xent.cross_entropy(z, classes, reduction="sum", backend=target.name), (logits,), None
    )
    assert target.harness.numpy(loss) == np.inf
    np.testing.assert_allclose(target.harness.numpy(gradient)[0, 1], -1.0)


SHIFTED = [
    *(
        Case("linear_cross_entropy", (3, 9), 21, "float32", "", options, reduction, stats=("count",))
        for options in ({}, {"sample_weight": True})
        for reduction in ("mean", "none")
    ),
    *(log_prob_case("linear_log_probs", options, rows=(3, 9), vocabulary=21, shift=0) for options in OPTIONS),
]


@pytest.mark.parametrize("case", SHIFTED, ids=str)
def test_shift_equals_slicing(target: Target, case: Case) -> None:
    inputs = make_inputs(case)
    _, (hidden, *rest) = call_of(target, case, inputs)
    rows = {"target": inputs.target} | {
        name: inputs.options[name] for name in ("temperature", "sample_weight") if name in inputs.options
    }
    for shift in (0, 1, 2, 8, 9, 10, 1499):
        kept = max(9 - shift, 0)
        moved = {name: target.arrays(values[:, shift:])[0] for name, values in rows.items()}
        if "support" in inputs.options:
            moved["support"] = of_rows(target, inputs.options["support"], np.arange(27).reshape(3, 9)[:, shift:])
        shifted = case.results_in(call_of(target, case, inputs, shift=shift)[0](hidden, *rest))
        sliced = case.results_in(call_of(target, case, inputs, **moved)[0](hidden[:, :kept], *rest))
        for name in case.results:
            found, expected = target.harness.numpy(shifted[name]), target.harness.numpy(sliced[name])
            if found.ndim:
                assert found.shape == (3, 9)
                assert (found[:, kept:] == 0).all()
                found = found[:, :kept]
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def of_rows(target: Target, support: xent.Support, rows: Any) -> xent.Support:
    """Return the support of some rows."""
    sets = [support.ids[support.offsets[row] : support.offsets[row + 1]] for row in rows.ravel()]
    ids = np.concatenate([np.zeros(0, np.int64), *sets])
    return xent.Support(*target.arrays(ids, np.cumsum([0, *map(len, sets)])))
