"""A small language model that is trained on real text, with operations that all frameworks have.

The text is this project's licence. The model predicts a word from the three before it. Parameters and optimizer are in
NumPy: each step copies the parameters to the device and reads the loss and their gradients, so that two runs differ
only in the loss. A framework needs only its harness.

Two measures find faults that a comparison of losses would miss. The gradient of the logits is that of zeros that are
added to them, so that a loss cannot change it in place. And the logits are used a second time, for a small penalty on
their squares after the loss.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import xent
from tests.packaging.tree import ROOT
from tests.targets import Target

__all__ = ["LOSSES", "Loss", "Run", "Step", "from_logits", "penalized", "train", "vocabulary"]

CONTEXT, EMBEDDING, WIDTH = 3, 16, 48
RATE, MOMENTUM, PENALTY = 2.0, 0.8, 3e-4
OPTIONS = {"softcap": 20.0, "z_loss": 1e-4, "label_smoothing": 0.05}

Loss = Callable[[Target, tuple[Any, ...], Any, Any], Any]
"""(target, (hidden, weight, bias, zeros), classes, options) -> loss"""


@dataclass(frozen=True)
class Step:
    """The results of one training step: the loss, and the gradient of the logits if there are logits."""

    loss: float
    logits: Any


@dataclass(frozen=True)
class Run:
    """All steps, and the parameters before and after them."""

    steps: list[Step]
    before: list[Any]
    after: list[Any]

    @property
    def losses(self) -> list[float]:
        """The loss at each step."""
        return [step.loss for step in self.steps]


def _words() -> tuple[Any, int]:
    words = re.findall(r"\w+|[^\w\s]", (ROOT / "LICENSE").read_text(encoding="utf-8").lower())
    numbers = {word: number for number, word in enumerate(sorted(set(words)))}
    return np.array([numbers[word] for word in words]), len(numbers)


def vocabulary() -> int:
    """Return the number of different words."""
    return _words()[1]


def penalized(target: Target, arrays: tuple[Any, ...], loss: Callable[[Any], Any]) -> Any:
    """Return the loss of logits that are used again after it."""
    hidden, weight, bias, zeros = arrays
    logits = target.harness.linear(hidden, weight, bias) + zeros
    value = loss(logits)
    return value + PENALTY / logits.shape[0] * (logits * logits).sum()


def plain(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Compute the loss with the framework's own operations."""
    return penalized(target, arrays, lambda logits: target.harness.unfused_loss(logits, classes, **options))


def from_logits(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Compute the loss with `xent.cross_entropy`."""
    return penalized(target, arrays, lambda logits: xent.cross_entropy(logits, classes, backend=target.name, **options))


def plain_alone(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Compute the loss with the framework's own operations, without the penalty."""
    hidden, weight, bias, zeros = arrays
    return target.harness.unfused_loss(target.harness.linear(hidden, weight, bias) + zeros, classes, **options)


def from_hidden(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Compute the loss with `xent.linear_cross_entropy`, which has no logits to penalize."""
    hidden, weight, bias, zeros = arrays
    loss = xent.linear_cross_entropy(hidden, weight, classes, linear_bias=bias, backend=target.name, **options)
    return loss + 0 * zeros.sum()


LOSSES: dict[str, tuple[Loss, Loss]] = {
    "cross_entropy": (plain, from_logits),
    "linear_cross_entropy": (plain_alone, from_hidden),
}
"""Function of xent -> (plain loss, loss under test)."""


def train(target: Target, loss: Loss, dtype: str) -> Run:
    """Train with a loss."""
    text, count = _words()
    rows, steps = (12, 12) if target.interpreted else (128, 60)
    generator = np.random.default_rng(0)
    shapes = [(count, EMBEDDING), (CONTEXT * EMBEDDING, WIDTH), (count, WIDTH), (count,)]
    parameters = [generator.normal(size=shape) * 0.5 / shape[-1] ** 0.5 for shape in shapes[:-1]] + [np.zeros(count)]
    before = [value.copy() for value in parameters]
    speeds = [np.zeros_like(value) for value in parameters]
    done = []
    for _ in range(steps):
        starts = generator.integers(len(text) - CONTEXT, size=rows)
        words = text[starts[:, None] + np.arange(CONTEXT)]
        following = text[starts + CONTEXT]
        masked = np.where(generator.random(rows) < 0.25, -100, following)
        context, classes = target.arrays(words, masked)

        def of_parameters(embedding: Any, layer: Any, weight: Any, bias: Any, zeros: Any, *, c: Any = context) -> Any:
            mixed = embedding[c].reshape(rows, CONTEXT * EMBEDDING) @ layer
            return loss(target, (mixed / (1 + mixed.abs()), weight, bias, zeros), classes, OPTIONS)  # noqa: B023

        arrays = target.arrays(*parameters, np.zeros((rows, count)), dtype=dtype)
        value, gradients = target.harness.gradients(of_parameters, arrays, None)
        *made, logits = [np.array(target.harness.numpy(gradient)) for gradient in gradients]
        for number, gradient in enumerate(made):
            speeds[number] = MOMENTUM * speeds[number] + gradient
            parameters[number] = parameters[number] - RATE * speeds[number]
        done.append(Step(float(target.harness.numpy(value)), logits))
    return Run(done, before, parameters)
