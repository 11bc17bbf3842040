"""Distillation for the language model of these tests: a teacher that knows the next word, and some of the others."""

from typing import Any

import numpy as np

import xent
from tests.convergence.training import Loss, penalized, vocabulary
from tests.targets import Target

__all__ = ["DISTILLATIONS"]

BETA = 1.0
CLASSES = 8


def _taught(target: Target, classes: Any) -> tuple[Any, Any, Any]:
    """Return the teacher's logits, its most probable classes, and the weights of the words, 0 for masked ones."""
    words = target.harness.numpy(classes).astype(int)
    logits = 7.0 * (np.arange(vocabulary()) == words[:, None]) + np.sin(words[:, None] * np.arange(vocabulary()))
    log_q = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    ids = np.argsort(-log_q, -1)[:, :CLASSES]
    dense, weight, ids, log_probs = target.arrays(
        logits, 1.0 * (words != -100), ids, np.take_along_axis(log_q, ids, -1)
    )
    return dense, xent.TopKTeacher(ids, log_probs), weight


def _of_logits(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
    teacher, _, weight = _taught(target, classes)
    given = {"beta": BETA, "sample_weight": weight, "backend": target.name}
    return penalized(target, arrays, lambda logits: xent.divergence(logits, teacher, **given))


def _of_hidden(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
    hidden, weight, bias, zeros = arrays
    _, teacher, of_rows = _taught(target, classes)
    given = {"linear_bias": bias, "sample_weight": of_rows, "backend": target.name}
    return xent.linear_divergence(hidden, weight, teacher, **given) + 0 * zeros.sum()


def _plain(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
    teacher, _, weight = _taught(target, classes)
    given = {"teacher": teacher, "beta": BETA, "sample_weight": weight}
    return penalized(target, arrays, lambda logits: target.harness.unfused_divergence(logits, **given))


def _plain_alone(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
    hidden, weight, bias, zeros = arrays
    _, known, of_rows = _taught(target, classes)
    given = {"ids": known.ids, "log_probs": known.log_probs, "tail": "bucket", "sample_weight": of_rows}
    return target.harness.unfused_divergence(target.harness.linear(hidden, weight, bias) + zeros, **given)


DISTILLATIONS: dict[str, tuple[Loss, Loss]] = {
    "divergence": (_plain, _of_logits),
    "linear_divergence": (_plain_alone, _of_hidden),
}
"""Function of xent -> the loss in the framework's own operations, and the one under test."""
