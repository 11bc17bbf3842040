"""Train two copies of one model in turns, each with its own loss.

Each batch is a round: every model takes a step on it, and times are compared within the round, since another program
slows down both. Times are medians over the rounds.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from demo.device import synchronize
from demo.losses import Loss
from demo.model import LanguageModel

__all__ = ["Run", "Trainer", "make_trainers", "take_turns"]

LEARNING_RATE = 1e-3
WARMUP_SHARE = 0.1
LARGEST_GRADIENT_NORM = 1.0
FEWEST_STEPS = 12


@dataclass
class Run:
    """The measurements of one training run; each list has one entry per step."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    loss_seconds: list[float] = field(default_factory=list)
    validation_loss: float = math.nan

    @property
    def step_time(self) -> float:
        """The median time of a step in seconds."""
        return statistics.median(self.step_seconds)

    @property
    def loss_time(self) -> float:
        """The median time of the loss in a step in seconds, including its backward pass."""
        return statistics.median(self.loss_seconds)


class Trainer:
    """One copy of the model, its optimizer and its loss."""

    def __init__(self, model: LanguageModel, loss: Loss, steps: int, device: torch.device) -> None:
        self.model = model
        self.loss = loss
        self.device = device
        self.run = Run()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: _learning_rate(step, steps))

    def step(self, windows: Tensor) -> None:
        """Train on one batch of windows (batch, context + 1), and measure the times.

        The time of the loss is from its call to the moment when the gradient of the hidden states arrives: then its
        backward pass is done, and that of the model starts.
        """
        inputs, targets = windows[:, :-1], windows[:, 1:]
        loss_done = math.nan

        def stop_loss_clock(_: Tensor) -> None:
            nonlocal loss_done
            loss_done = self._now()

        started = self._now()
        hidden = self.model(inputs)
        hidden.register_hook(stop_loss_clock)
        loss_started = self._now()
        loss = self.loss(hidden, self.model.head.weight, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        ended = self._now()
        self.run.losses.append(loss.item())
        self.run.step_seconds.append(ended - started)
        self.run.loss_seconds.append(loss_done - loss_started)

    @torch.no_grad()
    def validate(self, windows: Tensor, batch: int) -> None:
        """Record the mean loss over held-out windows (n, context + 1)."""
        total = 0.0
        for part in windows.split(batch):
            loss = self.loss(self.model(part[:, :-1]), self.model.head.weight, part[:, 1:])
            total += loss.item() * len(part)
        self.run.validation_loss = total / len(windows)

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def make_trainers(
    losses: dict[str, Loss], vocabulary: int, context: int, steps: int, seed: int, device: torch.device
) -> dict[str, Trainer]:
    """Return one trainer per loss, all with the same initial weights."""
    torch.manual_seed(seed)
    model = LanguageModel(vocabulary, context)
    return {name: Trainer(copy.deepcopy(model).to(device), loss, steps, device) for name, loss in losses.items()}


def take_turns(
    trainers: Iterable[Trainer], batches: Iterable[Tensor], seconds: float, after_step: Callable[[], None]
) -> None:
    """Train every trainer on every batch, or on as many as `seconds` allow, at least `FEWEST_STEPS`.

    The order is reversed after each batch, because the second may find warmer caches.
    """
    order = list(trainers)
    end = time.monotonic() + seconds
    for number, windows in enumerate(batches):
        if number >= FEWEST_STEPS and time.monotonic() > end:
            return
        for trainer in order:
            trainer.step(windows)
        order.reverse()
        after_step()


def _learning_rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up, then half a cosine down to a tenth."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
