"""The process with the trained model, `python -m benchmarks.training.worker`; see `benchmarks.protocol`.

A step is a forward pass, a backward pass and a step of AdamW. The variants share the model, its weights, and the state
of AdamW, which exists before the first step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from benchmarks.contenders.entry import Absent
from benchmarks.devices import DEVICES, Device
from benchmarks.gpu.clock import loop_seconds
from benchmarks.gpu.facts import gpu_facts
from benchmarks.protocol import OUT_OF_MEMORY, Describe, FirstStep, OpenTraining, PeakStep, Request, Steps
from benchmarks.serve import serve
from benchmarks.training.models import make_model
from benchmarks.training.variants import VARIANTS

__all__ = ["Training", "main"]

_MASKED = 0.25
_IGNORED = -100


class Training:
    """A model with its optimizer, which answers requests."""

    def __init__(self) -> None:
        self._device: Device
        self._device_name = "cpu"
        self._network: Any = None
        self._optimizer: Any = None
        self._data: Any = None
        self._held_bytes = 0

    def answer(self, request: Request) -> dict[str, Any]:
        """Reply to one request; an exception becomes a reply too, except for one that leaves the GPU unusable."""
        import torch

        try:
            return self._answer(request)
        except Absent as absent:
            return {"absent": str(absent)}
        except torch.OutOfMemoryError:
            return {"skipped": OUT_OF_MEMORY}
        except Exception as error:
            if self._device_name == "cuda":
                torch.cuda.synchronize()  # raises after an illegal access, which ends the process
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}

    def _answer(self, request: Request) -> dict[str, Any]:
        match request:
            case Describe(device=device):
                return gpu_facts(device)
            case OpenTraining():
                return self._open(request)
            case FirstStep() | PeakStep() | Steps():
                try:
                    return self._train(request)
                finally:
                    self._optimizer.zero_grad(set_to_none=True)
            case _:
                raise TypeError(f"a training process cannot answer {request!r}")

    def _open(self, request: OpenTraining) -> dict[str, Any]:
        """Replace the model, and create the optimizer's state with gradients of zero."""
        import torch

        self._network = self._optimizer = self._data = None
        gc.collect()
        if request.device == "cuda":
            torch.cuda.empty_cache()
        self._device_name = request.device
        self._device = DEVICES[request.device]()
        self._network = make_model(request.model, request.device, request.dtype, request.checkpointing)
        weights = list(self._network.parameters())
        # fused: no temporary copies, no synchronisation.
        self._optimizer = torch.optim.AdamW(weights, lr=1e-5, weight_decay=0.0, fused=True)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        states = [each for state in self._optimizer.state.values() for each in state.values()]
        self._held_bytes = sum(each.numel() * each.element_size() for each in [*weights, *states])
        return {"held_bytes": self._held_bytes}

    def _train(self, request: FirstStep | PeakStep | Steps) -> dict[str, Any]:
        gc.collect()  # what a failed step left
        tokens, labels = self._batch(request.length)
        with VARIANTS[request.variant](self._network) as loss_of:
            if isinstance(request, FirstStep):
                loss = loss_of(tokens, labels)
                loss.backward()
                return {"loss": loss.item()}

            def step() -> None:
                loss_of(tokens, labels).backward()
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)

            if isinstance(request, Steps):
                return {"seconds": loop_seconds(self._device, step, request.steps)}
            seconds = 0.0

            def timed_step() -> None:
                nonlocal seconds
                seconds = loop_seconds(self._device, step, 1)

            peak = self._peak(timed_step)
            return {"peak": None if peak is None else self._held_bytes + peak, "seconds": seconds}

    def _peak(self, call: Callable[[], None]) -> int | None:
        """Return the peak above the memory in use. On a GPU the allocator keeps its cache for the steps to come."""
        import torch

        if self._device_name == "cpu":
            return self._device.peak(call)
        self._device.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before

    def _batch(self, length: int) -> Any:
        """Return random tokens, and the same as labels, a quarter of them masked."""
        import torch

        if self._data is None or self._data[0].shape[1] != length:
            generator = torch.Generator().manual_seed(length)
            tokens = torch.randint(3, self._network.config.vocab_size, (1, length), generator=generator)
            labels = tokens.masked_fill(torch.rand(1, length, generator=generator) < _MASKED, _IGNORED)
            self._data = tokens.to(self._device_name), labels.to(self._device_name)
        return self._data


def main() -> None:
    """Answer requests until stdin ends."""
    serve(Training().answer)


if __name__ == "__main__":
    main()
