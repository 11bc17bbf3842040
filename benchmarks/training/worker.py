"""One variant of one step, measured in a process of its own: a question as JSON in, numbers as JSON out."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.memory import allocated_peak, resident_peak
from benchmarks.training.models import make_model

__all__ = ["measure"]

_WARM_UP = 2


def measure(
    model: str, variant: str, length: int, device: str, dtype: str, checkpointing: bool, steps: int
) -> dict[str, Any]:
    """Return the loss of the first step, the median time in seconds, and the peak memory in bytes.

    A step is forward, backward and the optimizer's update. `step` is the peak above what is alive between steps: the
    weights and the state of AdamW. `total` is all of it, where PyTorch's allocator can say so.
    """
    import torch

    if variant == "patched":
        from xent.integrations.transformers import patch
    network = make_model(model, device, dtype, checkpointing, length)
    if variant == "patched":
        patch(network)
    tokens = torch.randint(3, network.config.vocab_size, (1, length), device=device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, fused=True)  # no temporary copies
    losses: list[float] = []

    def step() -> None:
        loss = network(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

    for _ in range(_WARM_UP):
        step()
    if device == "cuda":
        peak: int | None = allocated_peak(step)
        total: int | None = torch.cuda.max_memory_allocated()
    else:
        peak, total = resident_peak(step), None
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()  # ends with the loss on the host, and so with the device at rest but for the update
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"loss": losses[0], "seconds": sorted(times)[len(times) // 2], "step": peak, "total": total}


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
