"""`shift` of linear_divergence: labels select the positions that predict them."""

from typing import Any

import numpy as np
import pytest

import xent
from tests.targets import Target

PROMPT, COMPLETION, WIDTH, CLASSES = [11, 3, 7], [5, 0, 9], 6, 13
LABELS = np.array([[-100] * len(PROMPT) + COMPLETION])
PREDICTING = slice(len(PROMPT) - 1, len(PROMPT) + len(COMPLETION) - 1)


def drawn() -> tuple[Any, ...]:
    """Return the hidden states (1, 6, D) and classifiers of student and teacher for a prompt and its completion."""
    rng = np.random.default_rng(0)
    tokens, embedding = PROMPT + COMPLETION, rng.normal(0, 1, (CLASSES, WIDTH))
    hidden = embedding[tokens][None] + rng.normal(0, 0.1, (1, len(tokens), WIDTH))
    weight, teacher = rng.normal(0, 1, (2, CLASSES, WIDTH))
    return hidden, weight, rng.normal(0, 1, hidden.shape), teacher


def teachers(target: Target, hidden: Any, weight: Any) -> dict[str, Any]:
    """Return the teacher of these hidden states in all forms."""
    logits = hidden @ weight.T
    log_q = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    ids = np.argsort(-log_q, -1)[..., :4]
    h, w, z, known, log_probs = target.arrays(hidden, weight, logits, ids, np.take_along_axis(log_q, ids, -1))
    return {"linear": xent.LinearTeacher(h, w), "logits": z, "top k": xent.TopKTeacher(known, log_probs)}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["linear", "logits", "top k"])
def test_labels_select_the_positions_that_predict_them(target: Target, kind: str, reduction: str) -> None:
    hidden, weight, taught, head = drawn()
    h, w, mask = target.arrays(hidden, weight, LABELS != -100)
    part, w_part = target.arrays(hidden[:, PREDICTING], weight)
    options = {"reduction": reduction, "backend": target.name}

    def shifted(h: Any, w: Any) -> Any:
        teacher = teachers(target, taught, head)[kind]
        return xent.linear_divergence(h, w, teacher, sample_weight=mask, shift=1, **options)

    def sliced(h: Any, w: Any) -> Any:
        return xent.linear_divergence(h, w, teachers(target, taught[:, PREDICTING], head)[kind], **options)

    upstream = np.linspace(0.5, 2, 6)[None]
    if reduction != "none":
        given, of_part = None, None
    else:
        given, of_part = target.arrays(upstream, upstream[:, PREDICTING])
    found, (of_hidden, of_weight) = target.harness.gradients(shifted, (h, w), given)
    expected, (of_hidden_part, of_weight_part) = target.harness.gradients(sliced, (part, w_part), of_part)
    if reduction == "none":
        padded = np.zeros((1, 6))
        padded[:, PREDICTING] = target.harness.numpy(expected)
        target.close(found, padded, rtol=1e-5, atol=1e-6)
    else:
        target.close(found, expected, rtol=1e-5)
    whole = np.zeros_like(hidden)
    whole[:, PREDICTING] = target.harness.numpy(of_hidden_part)
    target.close(of_hidden, whole, rtol=1e-4, atol=1e-6)
    target.close(of_weight, of_weight_part, rtol=1e-4, atol=1e-6)


def test_rows_without_a_later_token_have_weight_0(target: Target) -> None:
    """Also without sample weights: the mean is over the rows that predict a token."""
    hidden, weight, taught, head = drawn()
    h, w, cut = target.arrays(hidden, weight, hidden[:, :-2])
    options = {"backend": target.name}
    teacher, of_cut = (teachers(target, values, head)["linear"] for values in (taught, taught[:, :-2]))
    found = xent.linear_divergence(h, w, teacher, shift=2, **options)
    expected = xent.linear_divergence(cut, w, of_cut, **options)
    target.close(found, expected, rtol=1e-5)
    none = xent.linear_divergence(h, w, teacher, shift=6, **options)
    assert float(target.harness.numpy(none)) == 0.0


def test_reference_takes_the_weight_of_the_next_label() -> None:
    hidden, weight, taught, head = drawn()
    teacher, mask = xent.LinearTeacher(taught, head), LABELS != -100
    rows = xent.linear_divergence(hidden, weight, teacher, reduction="none")
    found = xent.linear_divergence(hidden, weight, teacher, sample_weight=mask, shift=1)
    assert found == pytest.approx(rows[:, PREDICTING].mean())
    assert found != pytest.approx(float(xent.linear_divergence(hidden, weight, teacher, sample_weight=mask)))
