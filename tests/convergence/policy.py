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

__all__ = ["POLICIES", "Rows", "of_hidden", "of_logits", "still"]

BONUS = 0.05
SOFTCAP = 20.0

Rows = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(log-probabilities, entropy, temperature) -> the first two for the loss, possibly with a planted fault."""


def as_they_are(log_probs: Any, entropy: Any, temperature: Any) -> tuple[Any, Any]:
    """Return both unchanged."""
    return log_probs, entropy


def still(target: Target, array: Any) -> Any:
    """Return the same values without a gradient."""
    if target.backend.framework == "torch":
        return array.detach()
    import mlx.core as mx

    return mx.stop_gradient(array)


def _sampled(target: Target, classes: Any) -> tuple[Any, Any, Any]:
    """Return the temperature and the advantage of each word, and the number of unmasked words."""
    words = target.harness.numpy(classes)
    temperature, advantage = 0.7 + (words * 5 % 7) / 10, (words * 11 % 13) / 8 - 0.1
    return *target.arrays(temperature, np.where(words == -100, 0.0, advantage)), max(int((words != -100).sum()), 1)


def _loss(target: Target, classes: Any, of_rows: Callable[[Any], tuple[Any, Any]], taken: Rows) -> Any:
    temperature, advantage, count = _sampled(target, classes)
    log_probs, entropy = taken(*of_rows(temperature), temperature)
    return -((advantage * log_probs).sum() + BONUS * entropy.sum()) / count


def _unfused(target: Target, logits: Any, classes: Any) -> Callable[[Any], tuple[Any, Any]]:
    words = target.harness.numpy(classes)
    ignored, chosen = (target.harness.array(values) for values in (words == -100, np.where(words == -100, 0, words)))

    def of_rows(temperature: Any) -> tuple[Any, Any]:
        rows = target.harness.unfused_rows(logits, chosen, ignored, softcap=SOFTCAP, temperature=temperature)
        return 0 - rows["nll"], rows["entropy"]

    return of_rows


def of_logits(taken: Rows = as_they_are) -> Loss:
    """Return the loss with `xent.log_probs`."""

    def loss(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
        def of(logits: Any) -> Any:
            return _loss(
                target,
                classes,
                lambda temperature: xent.log_probs(
                    logits, classes, temperature=temperature, softcap=SOFTCAP, entropy=True, backend=target.name
                ),
                taken,
            )

        return penalized(target, arrays, of)

    return loss


def of_hidden(taken: Rows = as_they_are) -> Loss:
    """Return the loss with `xent.linear_log_probs`, which has no logits to penalize."""

    def loss(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
        hidden, weight, bias, zeros = arrays
        found = _loss(
            target,
            classes,
            lambda temperature: xent.linear_log_probs(
                hidden,
                weight,
                classes,
                linear_bias=bias,
                temperature=temperature,
                softcap=SOFTCAP,
                entropy=True,
                backend=target.name,
            ),
            taken,
        )
        return found + 0 * zeros.sum()

    return loss


def _plain(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
    return penalized(
        target, arrays, lambda logits: _loss(target, classes, _unfused(target, logits, classes), as_they_are)
    )


def _plain_alone(target: Target, arrays: tuple[Any, ...], classes: Any, options: Any) -> Any:
    hidden, weight, bias, zeros = arrays
    logits = target.harness.linear(hidden, weight, bias) + zeros
    return _loss(target, classes, _unfused(target, logits, classes), as_they_are)


POLICIES: dict[str, tuple[Loss, Loss]] = {
    "log_probs": (_plain, of_logits()),
    "linear_log_probs": (_plain_alone, of_hidden()),
}
"""Function of xent -> the loss in the framework's own operations, and the one under test."""
