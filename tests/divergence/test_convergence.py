"""A student learns from a teacher as with the framework's own operations, and planted faults are detected."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import xent
from tests.covering import FULL
from tests.targets import Target

STEPS, ROWS, VOCABULARY, WIDTH, TEACHER_WIDTH, CLASSES = 40, 24, 53, 6, 10, 8
RATE = 6.0
AGREEMENT = 2e-4
"""Tolerance of the losses of two runs, relative to the loss. They differ by rounding only."""

Loss = Callable[[Target, str, tuple[Any, ...], Any], Any]
Fault = Callable[[list[Any]], list[Any]]
KINDS = ("forward", "reverse", "mixture", "bucket")
BETAS = {"forward": 0.0, "reverse": 1.0, "mixture": 0.5, "bucket": 0.0}


@cache
def drawn() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(STEPS, ROWS, WIDTH))
    wide = np.concatenate([hidden, rng.normal(size=(STEPS, ROWS, TEACHER_WIDTH - WIDTH))], -1)
    return {"hidden": hidden, "wide": wide, "teacher": rng.normal(0, 0.8, (VOCABULARY, TEACHER_WIDTH))}


def ours(target: Target, kind: str, student: tuple[Any, ...], step: int) -> Any:
    wide, weight = (target.harness.array(value, "float32") for value in (drawn()["wide"][step], drawn()["teacher"]))
    teacher = xent.LinearTeacher(wide, weight)
    if kind == "bucket":
        ids, log_probs = top_k(step)
        teacher = xent.TopKTeacher(target.harness.array(ids), target.harness.array(log_probs, "float32"))
    return xent.linear_divergence(*student[:2], teacher, linear_bias=student[2], beta=BETAS[kind], backend=target.name)


def plain(target: Target, kind: str, student: tuple[Any, ...], step: int) -> Any:
    logits = target.harness.linear(*student)
    if kind == "bucket":
        ids, log_probs = top_k(step)
        known = {"ids": target.harness.array(ids), "log_probs": target.harness.array(log_probs, "float32")}
        return target.harness.unfused_divergence(logits, **known, tail="bucket")
    wide, weight = (target.harness.array(value, "float32") for value in (drawn()["wide"][step], drawn()["teacher"]))
    return target.harness.unfused_divergence(
        logits, teacher=target.harness.linear(wide, weight, None), beta=BETAS[kind]
    )


def top_k(step: int) -> tuple[Any, Any]:
    x = drawn()["wide"][step] @ drawn()["teacher"].T
    log_q = x - np.logaddexp.reduce(x, -1, keepdims=True)
    ids = np.argsort(-log_q, -1)[:, :CLASSES]
    return ids, np.take_along_axis(log_q, ids, -1)


def losses(target: Target, kind: str, loss: Loss, fault: Fault = list) -> Any:
    """Train a student by steepest descent; return the loss at each step."""
    rng = np.random.default_rng(5)
    weight, bias = rng.normal(0, 0.1, (VOCABULARY, WIDTH)), np.zeros(VOCABULARY)
    found = []
    for step in range(STEPS):
        hidden, *trained = (target.harness.array(v, "float32") for v in (drawn()["hidden"][step], weight, bias))

        def value(w: Any, b: Any, hidden: Any = hidden, step: int = step) -> Any:
            return loss(target, kind, (hidden, w, b), step)

        made, gradients = target.harness.gradients(value, tuple(trained), None)
        found.append(float(target.harness.numpy(made)))
        grads = fault([target.harness.numpy(gradient) for gradient in gradients])
        weight, bias = weight - RATE * grads[0], bias - RATE * grads[1]
    return np.array(found)


def agree(one: Any, other: Any) -> bool:
    return bool((np.abs(one - other) <= AGREEMENT * np.abs(other)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_student_learns_as_with_plain_operations(target: Target, kind: str) -> None:
    if target.interpreted and not FULL and kind in ("forward", "mixture"):
        return
    expected = losses(target, kind, plain)
    assert expected[-5:].mean() < 0.75 * expected[:5].mean(), "nothing was learned"
    assert agree(losses(target, kind, ours), expected)


FAULTS: dict[str, Fault] = {
    "one per cent more": lambda grads: [1.01 * grad for grad in grads],
    "the last class has none": lambda grads: [np.concatenate([grad[:-1], np.zeros_like(grad[-1:])]) for grad in grads],
    "a shifted row": lambda grads: [np.roll(grad, 1, 0) for grad in grads],
    "a constant in every other class": lambda grads: [grads[0], grads[1] + 1e-3 * (np.arange(VOCABULARY) % 2)],
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_detected(target: Target, fault: Fault) -> None:
    if target.interpreted and not FULL:
        return
    assert not agree(losses(target, "reverse", plain, fault), losses(target, "reverse", plain))


def test_wrong_divergence_is_detected(target: Target) -> None:
    if target.interpreted and not FULL:
        return
    expected = losses(target, "forward", plain)
    for wrong in ("reverse", "mixture", "bucket"):
        assert not agree(losses(target, wrong, ours), expected)
