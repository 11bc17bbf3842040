"""`xent.Subset`: a teacher restricted to the student's classes."""

from typing import Any

import numpy as np
import pytest

import xent
from tests.targets import Target

ROWS, WIDTH, CLASSES = (2, 3), 6, 41
IDS = np.random.default_rng(1).permutation(CLASSES)[:17]


def drawn() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "hidden": rng.normal(0, 1, (*ROWS, 4)),
        "head": rng.normal(0, 1, (len(IDS), 4)),
        "input": rng.normal(0, 1, (*ROWS, WIDTH)),
        "weight": rng.normal(0, 1, (CLASSES, WIDTH)),
        "bias": rng.normal(0, 1, CLASSES),
    }


@pytest.mark.parametrize(
    "options", [{}, {"beta": 0.3, "temperature": 2.0}, {"beta": 1.0, "reduction": "none"}], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["linear", "logits"])
def test_equals_the_gathered_teacher(target: Target, kind: str, dtype: str, options: dict[str, Any]) -> None:
    """The results have the same bits as with the gathered rows of the classifier, or the gathered logits."""
    values = drawn()
    hidden, head = target.arrays(values["hidden"], values["head"], dtype=dtype)
    (ids,) = target.arrays(IDS)
    if kind == "linear":
        source, weight, bias = target.arrays(values["input"], values["weight"], values["bias"], dtype=dtype)
        more = {"softcap": 3.0, "logit_scale": 0.7}
        whole = xent.LinearTeacher(source, weight, bias, **more)
        part = xent.LinearTeacher(
            source, *target.arrays(values["weight"][IDS], values["bias"][IDS], dtype=dtype), **more
        )
    else:
        logits = values["input"] @ values["weight"].T
        whole, part = target.arrays(logits, logits[..., IDS], dtype=dtype)
    upstream = target.arrays(np.linspace(0.5, 2, 6).reshape(ROWS))[0] if "reduction" in options else None
    found = []
    for teacher in (xent.Subset(whole, ids), part):
        loss, gradients = target.harness.gradients(
            lambda hidden, head, teacher=teacher: xent.linear_divergence(
                hidden, head, teacher, backend=target.name, **options
            ),
            (hidden, head),
            upstream,
        )
        found.append([target.harness.numpy(one) for one in (loss, *gradients)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_logits_on_another_axis(target: Target) -> None:
    values = drawn()
    logits = np.moveaxis(values["input"] @ values["weight"].T, -1, 1)
    student, whole, part = target.arrays(
        np.moveaxis(values["hidden"] @ values["head"].T, -1, 1), logits, logits[:, IDS]
    )
    (ids,) = target.arrays(IDS.astype(np.int32))
    found, expected = (
        target.harness.numpy(xent.divergence(student, teacher, axis=1, backend=target.name))
        for teacher in (xent.Subset(whole, ids), part)
    )
    np.testing.assert_array_equal(found, expected)


def test_renormalises() -> None:
    """The teacher's probabilities of the student's classes are divided by their sum."""
    p, q = np.array([[0.5, 0.5]]), np.array([[0.2, 0.5, 0.3]])
    found = xent.divergence(np.log(p), xent.Subset(np.log(q), np.array([2, 0])))
    assert found == pytest.approx(0.6 * np.log(0.6 / 0.5) + 0.4 * np.log(0.4 / 0.5))


Z, WHOLE = np.zeros((2, 3, 4)), np.zeros((2, 3, 9))
ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "of top k": (
        xent.Subset(xent.TopKTeacher(np.zeros((2, 3, 1), int), np.zeros((2, 3, 1))), np.arange(4)),
        ValueError,
        "a xent.Subset of a TopKTeacher is not possible",
    ),
    "of itself": (
        xent.Subset(xent.Subset(WHOLE, np.arange(9)), np.arange(4)),
        TypeError,
        "the teacher of a xent.Subset must be an array of logits or a xent.LinearTeacher, got Subset",
    ),
    "too few": (
        xent.Subset(WHOLE, np.arange(3)),
        ValueError,
        r"teacher.ids of a xent.Subset must have shape \(4,\), .* got \(3,\)",
    ),
    "floats": (xent.Subset(WHOLE, np.arange(4.0)), TypeError, "teacher.ids must have an integer dtype"),
    "a list": (
        xent.Subset(WHOLE, [0, 1, 2, 3]),
        TypeError,
        "teacher.ids must be a torch, MLX or NumPy array, got list",
    ),
    "other rows": (
        xent.Subset(WHOLE[:1], np.arange(4)),
        ValueError,
        r"teacher must have shape \(2, 3, V\), .* got \(1, 3, 9\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    teacher, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        xent.divergence(Z, teacher)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0, 9, 2, 3], IndexError, r"teacher.ids\[1\] is 9; the teacher's classes are 0 to 8"),
        ([0, 1, -1, 3], IndexError, r"teacher.ids\[2\] is -1"),
        ([10**6, 1, 2, 3], IndexError, r"teacher.ids\[0\] is 1000000"),
        ([5, 1, 2, 5], ValueError, "teacher.ids of a xent.Subset must hold a class at most once, got 5 again"),
    ],
)
def test_invalid_ids(
    target: Target, ids: list[int], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where values are not checked, the result is NaN."""
    with pytest.raises(error, match=message):
        xent.divergence(Z, xent.Subset(WHOLE, np.array(ids)))
    z, whole, hidden, weight, placed = target.arrays(Z, WHOLE, np.zeros((2, 3, 5)), np.zeros((9, 5)), np.array(ids))
    for teacher in (whole, xent.LinearTeacher(hidden, weight)):
        monkeypatch.delenv("XENT_CHECK_TARGETS", raising=False)
        restricted = xent.Subset(teacher, placed)
        if not target.looks_at_targets:
            loss, (gradient,) = target.harness.gradients(
                lambda z, t=restricted: xent.divergence(z, t, backend=target.name), (z,), None
            )
            assert np.isnan(target.harness.numpy(loss))
            assert np.isnan(target.harness.numpy(gradient)).all()
            monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
        with pytest.raises(error, match=message):
            xent.divergence(z, restricted, backend=target.name)
