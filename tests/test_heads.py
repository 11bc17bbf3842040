"""A call with several heads equals the weighted sum of one call per head: loss and all gradients."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import xent
from tests.cases import DTYPES
from tests.covering import covering
from tests.targets import Target
from xent.command.check.case import Case, Inputs, make_inputs

ROWS, V = (2, 7), 19
WEIGHTS = (1.0, 0.5, -0.25)
FACTORS: dict[str, tuple[dict[str, Any], ...]] = {
    "shift": ({"shift": (1, 2, 3)}, {"shift": (0, 9, 4)}, {"shift": (2,)}),
    "reduction": (
        {},
        {"normalizer": 13.5},
        {"normalizer": "array"},
        {"normalizer": 0},
        {"reduction": "sum"},
        {"reduction": "none"},
    ),
    "head_weight": ({}, {"head_weight": WEIGHTS}),
    "target": ({}, {"ignore_index": 2}, {"probabilities": True}, {"target_dtype": "uint8", "ignore_index": 255}),
    "weight": ({}, {"weight": True, "label_smoothing": 0.1}),
    "options": ({}, {"softcap": 3.0, "logit_scale": 0.7, "z_loss": 0.05}),
    "sample_weight": ({}, {"sample_weight": True}),
    "bias": ({}, {"bias": True}),
    "workspace": ({}, {"workspace": 3 * V * 4}),
}
FIELDS = ("shift", "reduction", "target_dtype", "bias", "workspace")


def cases_of(strength: int, **more: Any) -> list[Case]:
    made = []
    for row in covering(FACTORS | more, strength, "heads"):
        settings = {name: value for setting in row.values() for name, value in setting.items()}
        fields = {name: settings.pop(name) for name in FIELDS if name in settings}
        if "head_weight" in settings:
            settings["head_weight"] = settings["head_weight"][: len(fields["shift"])]
        if fields.get("reduction") == "none":
            settings.pop("head_weight", None)
        dtype = settings.pop("dtype", "float32")
        name = ", ".join(f"{key}={value}" for key, value in (fields | settings).items())
        made.append(Case("linear_cross_entropy", ROWS, V, dtype, name, settings, **{"reduction": "mean"} | fields))
    return made


def draw(case: Case, seed: int = 0) -> Inputs:
    """Return a case's arrays, with hidden states and upstream gradients for each head."""
    inputs = make_inputs(case, seed)
    heads, rng = (len(case.shift), *case.rows), np.random.default_rng([seed, 1])
    hidden = rng.normal(0, 1, (*heads, case.hidden))
    upstream = rng.normal(0, 1, heads if case.reduction == "none" else ())
    return replace(inputs, differentiable=inputs.differentiable | {"input": hidden}, upstream=upstream)


def placed(target: Target, inputs: Inputs, wide: str) -> dict[str, Any]:
    """Return target and options with their arrays on the device."""
    given = {"target": inputs.target} | inputs.options
    return {
        name: target.arrays(value, dtype=wide)[0] if isinstance(value, np.ndarray) else value
        for name, value in given.items()
    }


@pytest.mark.parametrize("case", cases_of(2, dtype=tuple({"dtype": dtype} for dtype in DTYPES)), ids=str)
def test_loss_and_gradients(target: Target, case: Case) -> None:
    """The matrix judges the calls of single heads."""
    if not target.takes(case.dtype):
        return
    inputs = draw(case)
    names = tuple(inputs.differentiable)
    arrays = target.arrays(*inputs.differentiable.values(), dtype=case.dtype)
    given = placed(target, inputs, case.wide) | {"reduction": case.reduction, "workspace": case.workspace}
    weights = inputs.options.get("head_weight", (1.0,) * len(case.shift))

    def together(*arrays: Any) -> Any:
        return xent.linear_cross_entropy(
            **dict(zip(names, arrays, strict=True)), **given, shift=case.shift, backend=target.name
        )

    def alone(head: int) -> Any:
        options = {name: value for name, value in given.items() if name != "head_weight"}

        def loss(*arrays: Any) -> Any:
            named = dict(zip(names, arrays, strict=True))
            named["input"] = named["input"][head]
            return xent.linear_cross_entropy(**named, **options, shift=case.shift[head], backend=target.name)

        return loss

    upstream = np.asarray(inputs.upstream)
    made, gradients = target.harness.gradients(together, arrays, target.arrays(upstream, dtype=case.wide)[0])
    truth, total = [], [np.zeros(array.shape) for array in inputs.differentiable.values()]
    for head, weight in enumerate(weights):
        mine = target.arrays(np.asarray(upstream[head] if upstream.ndim else weight * upstream), dtype=case.wide)[0]
        loss, parts = target.harness.gradients(alone(head), arrays, mine)
        truth.append(target.harness.numpy(loss) * (1 if upstream.ndim else weight))
        total = [whole + target.harness.numpy(part) for whole, part in zip(total, parts, strict=True)]
    expected = np.stack(truth) if upstream.ndim else sum(truth)
    close = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}[case.dtype]
    found = [target.harness.numpy(array) for array in (made, *gradients)]
    for one, other in zip(found, (expected, *total), strict=True):
        assert one.shape == other.shape
        assert np.linalg.norm(one - other) <= close * np.linalg.norm(other)
    rows = np.linalg.norm(found[1] - total[0], axis=-1) <= 4 * close * np.linalg.norm(total[0], axis=-1)
    assert rows.all()


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("case", cases_of(2), ids=str)
def test_loss_and_statistics_equal_separate_calls(target: Target, case: Case, reference: bool) -> None:
    inputs = draw(case)
    given = {"target": inputs.target} | inputs.options if reference else placed(target, inputs, "float32")
    drawn = inputs.differentiable.values()
    arrays = dict(zip(inputs.differentiable, drawn if reference else target.arrays(*drawn), strict=True))
    given |= {"reduction": case.reduction, "backend": "numpy" if reference else target.name}
    rows = ("lse", "nll", "entropy", "predictions")
    given["stats"] = (*rows, "z_loss", "accuracy", "count")
    loss, stats = xent.linear_cross_entropy(**arrays, **given, shift=case.shift)
    _, alone = xent.linear_cross_entropy(**arrays, **given | {"stats": ("accuracy",)}, shift=case.shift)
    assert float(alone.accuracy) == pytest.approx(float(stats.accuracy))
    weights = given.pop("head_weight", (1,) * len(case.shift))
    hidden = arrays.pop("input")
    parts = [
        xent.linear_cross_entropy(hidden[head], **arrays, **given, shift=shift) for head, shift in enumerate(case.shift)
    ]
    close = {"rtol": 1e-12 if reference else 1e-5, "atol": 1e-12 if reference else 1e-6}

    def same(found: Any, of_parts: list[Any], in_rows: bool) -> None:
        numbers = [target.numbers(one) for one in of_parts]
        total = numbers if in_rows else sum(one * weight for one, weight in zip(numbers, weights, strict=True))
        np.testing.assert_allclose(target.numbers(found), total, **close)

    each_row = case.reduction == "none"
    same(loss, [part[0] for part in parts], each_row)
    same(stats.z_loss, [part[1].z_loss for part in parts], each_row)
    for name in rows:
        same(getattr(stats, name), [getattr(part[1], name) for part in parts], True)
    counts = [int(part[1].count) for part in parts]
    assert int(stats.count) == sum(counts)
    hits = sum(float(part[1].accuracy) * count for part, count in zip(parts, counts, strict=True))
    assert float(stats.accuracy) == pytest.approx(hits / max(sum(counts), 1))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("nothing", ["every target ignored", "no sequence", "no batch", "shifts beyond the sequence"])
def test_nothing_to_predict_is_zero_with_zero_gradients(target: Target, nothing: str, reduction: str) -> None:
    rows = {"no sequence": (3, 0), "no batch": (0, 3)}.get(nothing, (3, 4))
    shift = (4, 10**12) if nothing == "shifts beyond the sequence" else (1, 2)
    hidden, classifier = target.arrays(np.full((2, *rows, 5), np.nan), np.random.default_rng(0).normal(size=(6, 5)))
    (classes,) = target.arrays(np.full(rows, -100 if nothing == "every target ignored" else 1))
    ones = target.arrays(np.ones((2, *rows) if reduction == "none" else ()))[0]
    loss, gradients = target.harness.gradients(
        lambda x, w: xent.linear_cross_entropy(x, w, classes, shift=shift, reduction=reduction, backend=target.name),
        (hidden, classifier),
        ones,
    )
    assert tuple(loss.shape) == ((2, *rows) if reduction == "none" else ())
    for array, shape in zip((loss, *gradients), (loss.shape, hidden.shape, classifier.shape), strict=True):
        assert tuple(array.shape) == tuple(shape)
        assert (target.harness.numpy(array) == 0).all()


def test_error_has_the_position_in_the_callers_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    arrays = np.zeros((2, 2, 3, 4)), np.zeros((5, 4)), np.array([[99, 1, 2], [0, 3, 77]])
    for hidden, classifier, wrong in (arrays, target.arrays(*arrays)):
        with pytest.raises(IndexError, match=r"target\[1, 2\] is 77; classes are 0 to 4, or ignore_index=-100"):
            xent.linear_cross_entropy(hidden, classifier, wrong, shift=(2, 1))


HIDDEN, CLASSIFIER, CLASSES = np.zeros((2, 2, 3, 4)), np.zeros((5, 4)), np.zeros((2, 3), dtype=np.int64)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"shift": ()}, ValueError, r"shift must be an int >= 0, or a tuple with one such int for each head, got \(\)"),
    ({"shift": (1, -2)}, ValueError, r"shift must be an int >= 0, or a tuple .*, got \(1, -2\)"),
    ({"shift": (1, 2.0)}, TypeError, r"shift must be an int >= 0, or a tuple .*, got \(1, 2.0\)"),
    ({"shift": (1, True)}, TypeError, r"shift must be an int >= 0, or a tuple .*, got \(1, True\)"),
    ({"shift": (1, 2, 3)}, ValueError, r"shift=\(1, 2, 3\) needs input of shape \(3, ..., T, D\).*got \(2, 2, 3, 4\)"),
    ({"input": np.zeros((2, 4))}, ValueError, r"shift=\(1, 2\) needs input of shape \(2, ..., T, D\).*got \(2, 4\)"),
    ({"target": np.zeros((2, 2, 3), int)}, ValueError, r"target of class indices must have shape \(2, 3\) for input"),
    ({"sample_weight": np.ones((2, 2, 3))}, ValueError, r"sample_weight must have shape \(2, 3\), one per row"),
    ({"head_weight": (1,)}, ValueError, r"head_weight must have 2 entries, as shift=\(1, 2\) has; got 1"),
    ({"head_weight": 0.5}, TypeError, "head_weight must be a tuple of numbers, one for each head; got float 0.5"),
    ({"head_weight": np.ones(2)}, TypeError, "head_weight must be a tuple of numbers.*got numpy array"),
    ({"head_weight": (1, "2")}, TypeError, r"head_weight\[1\] must be a number, finite; got str '2'"),
    ({"head_weight": (1, float("nan"))}, ValueError, r"head_weight\[1\] must be finite, got nan"),
    ({"head_weight": (1, 2), "reduction": "none"}, ValueError, "head_weight would be ignored with reduction='none'"),
    ({"head_weight": (1, 2), "shift": 1}, ValueError, "head_weight needs a tuple as shift.*got shift=1"),
    ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer would be ignored with reduction='sum'"),
]


@pytest.mark.parametrize(("bad", "error", "message"), WRONG, ids=str)
def test_errors(target: Target, bad: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"input": HIDDEN, "linear_weight": CLASSIFIER, "target": CLASSES, "shift": (1, 2)} | bad
    with pytest.raises(error, match=message):
        xent.linear_cross_entropy(**arguments)
    given = {
        name: target.arrays(value)[0] if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }
    with pytest.raises(error, match=message.replace("numpy", target.backend.framework)):
        xent.linear_cross_entropy(**given)


def test_log_probabilities_have_no_heads() -> None:
    with pytest.raises(
        ValueError, match=r"shift must be an int >= 0, since only xent.linear_cross_entropy takes a tuple"
    ):
        xent.linear_log_probs(HIDDEN, CLASSIFIER, CLASSES, shift=(1, 2))


def test_lists_and_numpy_numbers_are_accepted() -> None:
    rng = np.random.default_rng(0)
    hidden, classifier = rng.normal(size=HIDDEN.shape), rng.normal(size=CLASSIFIER.shape)
    expected = xent.linear_cross_entropy(hidden, classifier, CLASSES, shift=(1, 0), head_weight=(1.0, 0.5))
    found = xent.linear_cross_entropy(
        hidden, classifier, CLASSES, shift=[np.int64(1), 0], head_weight=[1, np.float32(0.5)]
    )
    assert found == expected
