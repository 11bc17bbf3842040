"""The process that trains one variant of a model, `python -m benchmarks.training.worker`; see `benchmarks.protocol`.

A step is a forward pass, a backward pass and an optimizer step, without synchronisation between steps.
"""

from __future__ import annotations

from typing import Any

from benchmarks.devices import DEVICES, Device
from benchmarks.gpu.clock import loop_seconds
from benchmarks.gpu.facts import gpu_facts
from benchmarks.protocol import Describe, OpenTraining, Request, Steps
from benchmarks.serve import serve
from benchmarks.training.models import make_model

__all__ = ["Training", "main"]

_WARM_UP = 3


class Training:
    """A model with its optimizer, which answers requests."""

    def __init__(self) -> None:
        self._device: Device
        self._network: Any
        self._optimizer: Any
        self._tokens: Any

    def answer(self, request: Request) -> dict[str, Any]:
        """Reply to one request; an exception becomes a reply too."""
        try:
            match request:
                case Describe(device=device):
                    return gpu_facts(device)
                case OpenTraining():
                    return self._open(request)
                case Steps(steps=steps):
                    return {"seconds": loop_seconds(self._device, self._step, steps)}
                case _:
                    raise TypeError(f"a training process cannot answer {request!r}")
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _open(self, request: OpenTraining) -> dict[str, Any]:
        """Warm up; return the first loss, and the peak of a step in bytes.

        `step` is the peak above the memory in use between steps (weights and state of AdamW). `total` is the whole
        peak, if PyTorch's allocator reports it.
        """
        import torch

        self._device = DEVICES[request.device]()
        before = torch.cuda.memory_allocated() if request.device == "cuda" else 0
        network = make_model(request.model, request.device, request.dtype, request.checkpointing, request.length)
        if request.variant == "patched":
            from xent.integrations.transformers import patch

            patch(network)
        self._network = network
        self._tokens = torch.randint(3, network.config.vocab_size, (1, request.length), device=request.device)
        # fused: no temporary copies, no synchronisation.
        self._optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, fused=True)
        losses = [self._step() for _ in range(_WARM_UP)]
        step = self._device.peak(lambda: (self._step(), self._device.wait())[1])
        total = torch.cuda.max_memory_allocated() - before if request.device == "cuda" else None
        return {"loss": losses[0].item(), "step": step, "total": total}

    def _step(self) -> Any:
        loss = self._network(self._tokens, labels=self._tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def main() -> None:
    """Answer requests until stdin ends."""
    serve(Training().answer)


if __name__ == "__main__":
    main()
