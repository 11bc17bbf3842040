"""Bad input to divergences raises an error that names the argument, its value and what is allowed."""

from typing import Any

import numpy as np
import pytest

import xent
from tests.targets import Target
from tests.test_errors import BOTH as OF_LOSSES
from tests.test_errors import LINEAR_ONLY, OF_LOGITS

LOGITS, HIDDEN, CLASSIFIER = np.zeros((2, 3, 5)), np.zeros((2, 3, 4)), np.zeros((5, 4))
IDS = np.broadcast_to(np.array([0, 1]), (2, 3, 2)).copy()
LOG_PROBS = np.full((2, 3, 2), np.log(0.25))
TOP = xent.TopKTeacher(IDS, LOG_PROBS)


def changed(array: Any, index: tuple[int, ...], value: Any) -> Any:
    made = array.copy()
    made[index] = value
    return made


SHARED = {"softcap", "logit_scale", "reduction", "normalizer", "sample_weight", "backend"}
"""The arguments that the losses have too."""
BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"beta": 1.5}, ValueError, r"beta must be in \[0, 1\], got 1.5"),
    ({"beta": -0.1}, ValueError, r"beta must be in \[0, 1\], got -0.1"),
    ({"beta": float("nan")}, ValueError, r"beta must be in \[0, 1\]"),
    ({"beta": None}, TypeError, "beta must be a number"),
    ({"kind": "jsd"}, ValueError, "kind must be one of 'kl', 'tv', got 'jsd'"),
    ({"kind": None}, TypeError, "kind must be one of 'kl', 'tv', got None"),
    ({"kind": "tv", "beta": 0.5}, ValueError, "beta must be 0 with kind='tv', got 0.5: it selects one of kind='kl'"),
    ({"temperature": 0.0}, ValueError, "temperature must be finite and > 0, got 0.0"),
    ({"temperature": np.ones((2, 3))}, TypeError, "temperature must be a number, finite and > 0; got numpy array"),
    *(bad for bad in OF_LOSSES if bad[0].keys() <= SHARED),
    ({"stats": "entropy"}, TypeError, "stats must be a tuple, list or set of names from 'entropy'; got 'entropy'"),
    ({"stats": ("entropy", "lse")}, ValueError, "stats must be names from 'entropy'; got 'lse'"),
    (
        {"teacher": None},
        TypeError,
        "teacher must be an array of logits, a xent.LinearTeacher, a xent.TopKTeacher or a xent.Subset, got",
    ),
    ({"teacher": np.zeros((2, 3, 6))}, ValueError, r"teacher must have shape \(2, 3, 5\), .* got \(2, 3, 6\)"),
    ({"teacher": np.zeros((2, 3, 5), int)}, TypeError, "teacher must have one of the dtypes float64"),
    (
        {"teacher": xent.LinearTeacher(np.zeros((2, 3, 8)), np.zeros((6, 8)))},
        ValueError,
        "teacher.weight must have 5 rows, the student's vocabulary, got 6: a divergence compares distributions",
    ),
    (
        {"teacher": xent.LinearTeacher(np.zeros((2, 8)), np.zeros((5, 8)))},
        ValueError,
        r"teacher.input must have shape \(2, 3, D\), .* got \(2, 8\)",
    ),
    (
        {"teacher": xent.LinearTeacher(np.zeros((2, 3, 8)), np.zeros((5, 7)))},
        ValueError,
        r"teacher.weight must have shape \(V, D\) with D = 8",
    ),
    (
        {"teacher": xent.LinearTeacher(np.zeros((2, 3, 8)), np.zeros((5, 8)), np.zeros(4))},
        ValueError,
        r"teacher.bias must have shape \(5,\)",
    ),
    (
        {"teacher": xent.LinearTeacher(np.zeros((2, 3, 8)), np.zeros((5, 8)), softcap=-1.0)},
        ValueError,
        "softcap must be finite and > 0",
    ),
    (
        {"teacher": TOP, "beta": 1.0},
        ValueError,
        r"beta must be 0 with a TopKTeacher, got 1.0: KL\(p \|\| q\) and mixtures",
    ),
    ({"teacher": TOP, "beta": 0.5}, ValueError, "beta must be 0 with a TopKTeacher, got 0.5"),
    (
        {"teacher": xent.TopKTeacher(IDS, LOG_PROBS, tail="drop"), "kind": "tv"},
        ValueError,
        "teacher.tail must be 'bucket' or 'renormalize' with kind='tv', got 'drop'",
    ),
    (
        {"teacher": xent.TopKTeacher(IDS, LOG_PROBS, tail="ignore")},
        ValueError,
        "teacher.tail must be one of 'bucket', 'renormalize', 'drop', got 'ignore'",
    ),
    ({"teacher": xent.TopKTeacher(IDS * 1.0, LOG_PROBS)}, TypeError, "teacher.ids must have an integer dtype"),
    ({"teacher": xent.TopKTeacher(IDS[0], LOG_PROBS)}, ValueError, r"teacher.ids must have shape \(2, 3, K\)"),
    ({"teacher": xent.TopKTeacher(IDS, LOG_PROBS[..., :1])}, ValueError, "teacher.log_probs must have the shape of"),
    (
        {"teacher": xent.TopKTeacher(np.zeros((2, 3, 6), int), np.zeros((2, 3, 6)))},
        ValueError,
        "teacher.ids must hold 1 to 5 classes a row, the vocabulary; got 6",
    ),
]
VALUES: list[tuple[xent.TopKTeacher, type[Exception], str]] = [
    (
        xent.TopKTeacher(changed(IDS, (0, 2, 1), 5), LOG_PROBS),
        IndexError,
        r"teacher.ids of row \[0, 2\] holds (5; classes are|a class outside of) 0 to 4",
    ),
    (
        xent.TopKTeacher(changed(IDS, (1, 0, 0), -1), LOG_PROBS),
        IndexError,
        r"row \[1, 0\] holds (-1; classes are|a class outside of) 0 to 4",
    ),
    (xent.TopKTeacher(changed(IDS, (1, 1, 1), 0), LOG_PROBS), ValueError, r"row \[1, 1\] holds a class more than once"),
    (
        xent.TopKTeacher(IDS, changed(LOG_PROBS, (1, 2, 0), 0.0)),
        ValueError,
        r"log_probs of row \[1, 2\] have a mass of 1.25, more than 1 by more than rounding",
    ),
    (xent.TopKTeacher(IDS, changed(LOG_PROBS, (1, 2, 0), np.nan)), ValueError, r"row \[1, 2\] have a mass of nan"),
    (
        xent.TopKTeacher(IDS, changed(LOG_PROBS, (0, 1, slice(None)), -np.inf), tail="renormalize"),
        ValueError,
        r"row \[0, 1\] have no mass that could be renormalised",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BOTH, ids=[message[:40] for _, _, message in BOTH])
def test_both_functions(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        xent.divergence(**{"logits": LOGITS, "teacher": LOGITS} | arguments)
    with pytest.raises(error, match=message):
        xent.linear_divergence(**{"input": HIDDEN, "linear_weight": CLASSIFIER, "teacher": LOGITS} | arguments)


def test_arguments_of_one_function() -> None:
    for bad, error, message in OF_LOGITS:
        if "target" not in f"{bad} {message}":
            with pytest.raises(error, match=message):
                xent.divergence(**{"logits": LOGITS, "teacher": LOGITS} | bad)
    for bad, error, message in LINEAR_ONLY:
        if "target" not in f"{bad} {message}":
            with pytest.raises(error, match=message):
                xent.linear_divergence(**{"input": HIDDEN, "linear_weight": CLASSIFIER, "teacher": LOGITS} | bad)
    with pytest.raises(ValueError, match=r"shift must be an int >= 0, since only xent.linear_cross_entropy takes"):
        xent.linear_divergence(HIDDEN, CLASSIFIER, LOGITS, shift=(1, 2))
    with pytest.raises(ValueError, match=r"shift=1 needs a sequence axis: input of shape \(\.\.\., T, D\), got \(4,\)"):
        xent.linear_divergence(HIDDEN[0, 0], CLASSIFIER, LOGITS[0, 0], shift=1)
    packed = xent.QuantizedWeight(CLASSIFIER, CLASSIFIER)
    with pytest.raises(TypeError, match="linear_weight: a QuantizedWeight holds MLX arrays, got numpy array"):
        xent.linear_divergence(HIDDEN, packed, LOGITS)
    with pytest.raises(TypeError, match=r"teacher\.weight: a QuantizedWeight holds MLX arrays, got numpy array"):
        xent.linear_divergence(HIDDEN, CLASSIFIER, xent.LinearTeacher(HIDDEN, packed))
    with pytest.raises(TypeError, match=r"teacher\.weight\.packed must be a torch, MLX or NumPy array, got None"):
        xent.divergence(LOGITS, xent.LinearTeacher(HIDDEN, xent.QuantizedWeight(None, None)))


@pytest.mark.parametrize(("teacher", "error", "message"), VALUES, ids=[message[-30:] for _, _, message in VALUES])
def test_values_of_a_top_k_teacher(
    target: Target, teacher: xent.TopKTeacher, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where values are not checked, the row is NaN."""
    row = np.zeros((2, 3), bool)
    row[tuple(int(i) for i in message[message.index("[") + 1 : message.index("]") - 1].split(", "))] = True
    z, ids, log_probs, weight = target.arrays(LOGITS, teacher.ids, teacher.log_probs, np.where(row, 0.0, 1.0))
    known = xent.TopKTeacher(ids, log_probs, tail=teacher.tail)
    if not target.looks_at_targets:
        loss = xent.divergence(z, known, reduction="none", backend=target.name)
        np.testing.assert_array_equal(np.isnan(target.harness.numpy(loss)), row)
        monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    for logits, given, a in ((LOGITS, teacher, np.where(row, 0.0, 1.0)), (z, known, weight)):
        with pytest.raises(error, match=message):
            xent.divergence(logits, given)
        assert float(xent.divergence(logits, given, sample_weight=a)) < 1
