"""The process with the trained model.

A step is a forward pass, a backward pass and a step of AdamW. The variants share the model, its weights, and the state
of AdamW, which exists before the first step. The time of steps is that of a loop that synchronises once, at its end.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.cases import IGNORE_INDEX, tomllib
from benchmarks.clock import loop_seconds
from benchmarks.devices import DEVICES
from benchmarks.facts import device_facts
from benchmarks.training.variants import VARIANTS

__all__ = ["MODELS", "Training", "make_model"]

_MASKED = 0.25
_MOST_POSITIONS = 2**20

MODELS: dict[str, dict[str, Any]] = {
    name: {"tokens": 8192, "limit": 24.0, "steps": 1, "rounds": 3, **table}
    for name, table in tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8")).items()
}


def make_model(name: str, device: str, dtype: str, checkpointing: bool) -> Any:
    """Return the model with random weights, ready for training, without downloads."""
    import torch
    import transformers

    torch.manual_seed(0)
    usual = {"max_position_embeddings": _MOST_POSITIONS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if MODELS[name]["config"] == "Gemma2Config":
        usual["attn_logit_softcapping"] = None  # which SDPA does not have
    config = getattr(transformers, MODELS[name]["config"])(**MODELS[name]["fields"], **usual, use_cache=False)
    # transformers 5 refuses SDPA for Gemma-2 because of the softcap of attention, which the configuration above lacks.
    gemma = transformers.Gemma2PreTrainedModel
    with patch.object(gemma, "_supports_sdpa", True), torch.device(device):
        make: Any = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    if checkpointing:
        # The method was renamed in transformers 5.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.to(device).train()


class Training:
    """A model with its optimizer."""

    def __init__(self, device: str) -> None:
        self._kind = device
        self.network: Any = None
        self._optimizer: Any = None
        self._device: Any = None
        self._data: Any = None

    def describe(self) -> dict[str, Any]:
        """Return the facts of the device and its software."""
        return device_facts(self._kind)

    def open(self, model: str, dtype: str, checkpointing: bool) -> dict[str, Any]:
        """Replace the model, and create the optimizer's state with gradients of zero."""
        import torch

        self.network = self._optimizer = self._data = None
        gc.collect()
        if self._kind == "cuda":
            torch.cuda.empty_cache()
        self._device = self._device or DEVICES[self._kind]()
        self.network = make_model(model, self._kind, dtype, checkpointing)
        weights = list(self.network.parameters())
        # fused: no temporary copies, no synchronisation.
        self._optimizer = torch.optim.AdamW(weights, lr=1e-5, weight_decay=0.0, fused=True)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        self._optimizer.step()
        self.recover()
        states = [each for state in self._optimizer.state.values() for each in state.values()]
        self._held_bytes = sum(each.nbytes for each in [*weights, *states])
        return {"held_bytes": self._held_bytes}

    def loss(self, variant: str, length: int) -> dict[str, Any]:
        """Make a forward and a backward pass, without changing the weights."""
        tokens, labels = self._batch(length)
        with VARIANTS[variant](self.network) as loss_of:
            loss = loss_of(tokens, labels)
            loss.backward()
        self.recover()
        return {"loss": loss.item()}

    def steps(self, variant: str, length: int, count: int) -> dict[str, Any]:
        """Make training steps. Return the seconds of one."""
        tokens, labels = self._batch(length)
        with VARIANTS[variant](self.network) as loss_of:

            def step() -> None:
                loss_of(tokens, labels).backward()
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)

            return {"seconds": loop_seconds(self._device, step, count)}

    def peak(self, variant: str, length: int) -> dict[str, Any]:
        """Make a training step. Return its seconds and its peak with weights and optimizer, None if it is unknown."""
        reply: dict[str, Any] = {}
        peak = self._peak(lambda: reply.update(self.steps(variant, length, 1)))
        return reply | {"peak": None if peak is None else self._held_bytes + peak}

    def _peak(self, call: Callable[[], None]) -> int | None:
        """Return the peak above the memory in use. On a GPU the allocator keeps its cache for the steps to come."""
        import torch

        if self._kind == "cpu":
            return self._device.peak(call)  # type: ignore[no-any-return]
        self._device.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before

    def recover(self) -> None:
        """Drop gradients and what a failed step left; an error means that the device is lost."""
        if self._device is not None:
            self._device.wait()
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        gc.collect()

    def _batch(self, length: int) -> Any:
        """Return random tokens, and the same as labels, a quarter of them masked."""
        import torch

        if self._data is None or self._data[0].shape[1] != length:
            generator = torch.Generator().manual_seed(length)
            tokens = torch.randint(3, self.network.config.vocab_size, (1, length), generator=generator)
            labels = tokens.masked_fill(torch.rand(1, length, generator=generator) < _MASKED, IGNORE_INDEX)
            self._data = tokens.to(self._kind), labels.to(self._kind)
        return self._data
