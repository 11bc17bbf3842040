"""Training steps of whole models of transformers; `python -m benchmarks.training` measures the suite "training".

A step is a forward pass, a backward pass and a step of AdamW, with one sequence of which a quarter of the labels is
masked. Weights are random, and stay: the learning rate is 0. All implementations share the model and the state of
AdamW. Their peaks are with weights and optimizer, and count what PyTorch has allocated; a real GPU of the size of the
limit has a little less for it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.cases import IGNORE_INDEX, Case, tomllib
from benchmarks.clock import loop_seconds
from benchmarks.devices import Device
from benchmarks.problems import Problem

__all__ = ["TrainingProblem", "longest"]

_MODELS = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
_MASKED = 0.25
_MOST_POSITIONS = 2**20
_MOST_TRIALS, _TOLERANCE, _MOST_GROWTH, _MOST_SECONDS = 12, 0.03, 8, 10.0


class TrainingProblem(Problem):
    """A model with random weights, without downloads, and its optimizer."""

    def __init__(self, case: Case) -> None:
        """Create the model, and the optimizer's state with gradients of zero."""
        super().__init__(case)
        self.model = _make_model(case)
        weights = list(self.model.parameters())
        # fused: no temporary copies, no synchronisation.
        self._optimizer = torch.optim.AdamW(weights, lr=0.0, weight_decay=0.0, fused=True)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        self._optimizer.step()
        self.clear()
        states = [each for state in self._optimizer.state.values() for each in state.values()]
        self.held_bytes = sum(each.nbytes for each in [*weights, *states])
        self._stack = ExitStack()
        self._variant: Any = None
        self._loss_of: Any = None
        self._set_length(case.tokens)

    def set_up(self, in_place: bool = False, fresh: bool = True) -> tuple[Any, ...]:
        """Return (tokens, labels)."""
        self.clear()
        return self._data

    def clear(self) -> None:
        """Drop the gradients of a step that failed."""
        self._optimizer.zero_grad(set_to_none=True)

    def call(self, loss: Any, arguments: tuple[Any, ...]) -> Tensor:
        """Make a step within the context manager `loss(model)`, which stays until another one is used."""
        if self._variant is not loss:
            self._stack.close()
            self._variant = None
            self._loss_of = self._stack.enter_context(loss(self.model))
            self._variant = loss
        result: Tensor = self._loss_of(*arguments)
        result.backward()
        self._optimizer.step()
        self.clear()
        return result.detach()

    def longest(self, loss: Any, device: Device) -> dict[str, Any]:
        """Return the longest sequence that fits into the limit, and whether longer ones were not tried."""

        def trial(length: int) -> tuple[int | None, float]:
            self._set_length(length)
            seconds = []
            try:
                peak = device.peak(
                    lambda: seconds.append(loop_seconds(device, lambda: self.call(loss, self.set_up()), 1))
                )
            except torch.OutOfMemoryError:
                peak = None
            self.clear()
            return None if peak is None else self.held_bytes + peak, sum(seconds)

        tokens = self.case.tokens
        trials = {tokens: trial(tokens)}
        multiple = max(1, min(256, tokens // 8))
        try:
            found, at_least = longest(trial, trials, int(self.case.limit * 2**30), multiple, _MOST_SECONDS)
        finally:
            self._set_length(tokens)
        return {"longest": found, "at_least": at_least}

    def _set_length(self, length: int) -> None:
        """Draw random tokens, and the same as labels, a quarter of them masked."""
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(3, self.model.config.vocab_size, (1, length), generator=generator)
        labels = tokens.masked_fill(torch.rand(1, length, generator=generator) < _MASKED, IGNORE_INDEX)
        self._data = tokens.to(self.case.device), labels.to(self.case.device)


def _make_model(case: Case) -> Any:
    import transformers

    torch.manual_seed(0)
    shape = _MODELS[case.model]
    usual = {"max_position_embeddings": _MOST_POSITIONS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if shape["config"] == "Gemma2Config":
        usual["attn_logit_softcapping"] = None  # which SDPA does not have
    config = getattr(transformers, shape["config"])(**shape["fields"], **usual, use_cache=False)
    # transformers 5 refuses SDPA for Gemma-2 because of the softcap of attention, which the configuration above lacks.
    gemma: Any = transformers.Gemma2PreTrainedModel
    with patch.object(gemma, "_supports_sdpa", True), torch.device(case.device):
        make: Any = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=getattr(torch, case.dtype), attn_implementation="sdpa")
    if case.checkpointing:
        # The method was renamed in transformers 5.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.to(case.device).train()


def longest(
    trial: Callable[[int], tuple[int | None, float]],
    trials: dict[int, tuple[int | None, float]],
    limit: int,
    multiple: int,
    most_seconds: float,
) -> tuple[int | None, bool]:
    """Return the longest length whose peak is within the limit, to within 3%, and whether the search ended early.

    `trial(length)` returns the peak, None when memory did not suffice, and the seconds; `trials` has the first one, and
    gets all others. No step is made that should take more than `most_seconds`, with time as the square of the length.
    The peak is nearly linear in the length: the next length is where the line through two peaks meets the limit. Every
    third one is halfway between what fits and what does not.
    """
    while True:
        known = sorted((length, peak) for length, (peak, _) in trials.items() if peak is not None)
        best = max((length for length, peak in known if peak <= limit), default=0)
        over = min((length for length in trials if length > best), default=math.inf)
        pair = known[-2:]
        if over < math.inf:  # the last that fits and the first that does not, or the two shortest
            pair = [one for one in known if one[0] in (best, over)] if best else known[:2]
        predicted = 2.0 * best if over == math.inf else (best + over) / 2
        if len(pair) == 2:
            (one, low), (two, high) = pair
            line = one + (limit - low) * (two - one) / (high - low) if high > low else math.inf
            ends = line < best + max(multiple, _TOLERANCE * best)
            predicted = line if over == math.inf or ends or len(trials) % 3 else predicted
        length = min(predicted, over - multiple, _MOST_GROWTH * (best or math.inf))
        least = best + max(multiple, _TOLERANCE * best)
        ended = length // multiple * multiple < least
        if best:
            length = min(length, best * (most_seconds / trials[best][1]) ** 0.5)
        length = int(length // multiple * multiple)
        if length < least or len(trials) >= _MOST_TRIALS:
            return best or None, bool(best) and not ended
        trials[length] = trial(length)


if __name__ == "__main__":
    from benchmarks.cli import main

    sys.exit(main(["--suite", "training", *sys.argv[1:]]))
