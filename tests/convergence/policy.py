"""A policy-gradient loss with an entropy bonus, for the language model of these tests.

Each word is a sampled token with its own temperature and an advantage that depends on its index. The loss is
-mean(advantage * log-probability) - BONUS * mean(entropy), over the words that are not masked.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import xent
from tests.convergence.training import Loss, penalized
from tests.targets import Target

__all__ = ["POLICIES"]

BONUS = 0.05
SOFTCAP = 20.0


def _sampled(target: Target, classes: Any) -> tuple[Any, Any, Any]:
    """Return the temperature and the advantage of each word, and the number of unmasked words."""
    words = target.harness.numpy(classes)
    temperature, advantage = 0.7 + (words * 5 % 7) / 10, (words * 11 % 13) / 8 - 0.1
    return *target.arrays(temperature, np.where(words == -100, 0.0, advantage)), max(int((words != -100).sum()), 1)


def _loss(target: Target, classes: Any, of_rows: Callable[[Any], tuple[Any, Any]]) -> Any:
    temperature, advantage, count = _sampled(target, classes)
    log_probs, entropy = of_rows(temperature)
    return -((advantage * log_probs).sum() + BONUS * entropy.sum()) / count


def _unfused(target: Target, logits: Any, classes: Any) -> Callable[[Any], tuple[Any, Any]]:
    words = target.harness.numpy(classes)
    ignored, chosen = (target.harness.array(values) for values in (words == -100, np.where(words == -100, 0, words)))

    def of_rows(temperature: Any) -> tuple[Any, Any]:
        rows = target.harness.unfused_rows(logits, chosen, ignored, softcap=SOFTCAP, temperature=temperature)
        return 0 - rows["nll"], rows["entropy"]

    return of_rows


def _of_logits(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
    given = {"softcap": SOFTCAP, "entropy": True, "backend": target.name}

    def loss(logits: Any) -> Any:
        return _loss(target, classes, lambda heat: xent.log_probs(logits, classes, temperature=heat, **given))

    return penalized(target, arrays, loss)


def _of_hidden(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
    """Return the loss with `xent.linear_log_probs`, which has no logits to penalize."""
    hidden, weight, bias, zeros = arrays
    given = {"linear_bias": bias, "softcap": SOFTCAP, "entropy": True, "backend": target.name}

    def of_rows(temperature: Any) -> tuple[Any, Any]:
        found: tuple[Any, Any] = xent.linear_log_probs(hidden, weight, classes, temperature=temperature, **given)
        return found

    return _loss(target, classes, of_rows) + 0 * zeros.sum()


def _plain(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
    return penalized(target, arrays, lambda logits: _loss(target, classes, _unfused(target, logits, classes)))


def _plain_alone(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
    hidden, weight, bias, zeros = arrays
    logits = target.harness.linear(hidden, weight, bias) + zeros
    return _loss(target, classes, _unfused(target, logits, classes))


POLICIES: dict[str, tuple[Loss, Loss]] = {
    "log_probs": (_plain, _of_logits),
    "linear_log_probs": (_plain_alone, _of_hidden),
}
"""Function of xent -> the loss in the framework's own operations, and the one under test."""
