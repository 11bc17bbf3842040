"""The calls of the GPU tests: all functions, losses with every reduction, and their gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import xent

__all__ = ["CALLS", "Call", "run"]

ROWS, HIDDEN = 96, 64


@dataclass(frozen=True, eq=False)
class Call:
    """A public function, with options. A support has two classes per row, the target first."""

    function: str
    options: dict[str, Any] = field(default_factory=dict)
    vocabulary: int = 1000

    def __str__(self) -> str:
        named = [f"{name}={value}" for name, value in self.options.items()]
        return "-".join([self.function, str(self.vocabulary), *named])

    def draw(self, seed: int, device: str = "cuda") -> tuple[Tensor, ...]:
        """Return the differentiable tensors, then targets, some of them ignored, or a teacher's logits."""
        generator = torch.Generator().manual_seed(seed)
        target = torch.randint(self.vocabulary, (ROWS,), generator=generator)
        target[seed % 7 :: 7] = -100
        logits = ROWS, self.vocabulary
        shapes = [(ROWS, HIDDEN), (self.vocabulary, HIDDEN)] if self.function.startswith("linear") else [logits]
        drawn = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]
        if self.function.endswith("divergence"):
            target = torch.randn(logits, generator=generator)
        return (*(tensor.requires_grad_() for tensor in drawn), target.to(device))

    def __call__(self, *tensors: Tensor) -> Tensor:
        *sources, target = tensors
        if self.options.get("inplace"):
            sources = [source * 1 for source in sources]
        options = dict(self.options)
        if "support" in options:
            ids = torch.stack((target, target + 1), 1).flatten() % self.vocabulary
            options["support"] = xent.Support(ids, torch.arange(0, len(ids) + 1, 2, device=ids.device))
        return getattr(xent, self.function)(*sources, target, backend="triton", **options)


def run(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the loss and the gradients of all tensors that require one."""
    loss = call(*tensors)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, 0.5))


# Rows with one block, with several, with the largest blocks, and off the 16-byte boundaries.
SHORT, LONG, LONGEST, SHIFTED = 1000, 43_520, 131_072, 16_391
ONE_CHUNK = {"workspace": 2**30}
SEVERAL_CHUNKS = {"workspace": ROWS // 4 * SHORT * 2}
CALLS = [
    *(Call("cross_entropy", {"reduction": reduction, "z_loss": 1e-3}) for reduction in ("mean", "sum", "none")),
    *(Call("cross_entropy", {"reduction": reduction, "inplace": True}) for reduction in ("mean", "none")),
    Call("cross_entropy", {"label_smoothing": 0.1, "softcap": 10.0, "logit_scale": 0.5}),
    *(
        Call("cross_entropy", options, vocabulary)
        for options in ({}, {"label_smoothing": 0.1, "inplace": True})
        for vocabulary in (LONG, LONGEST, SHIFTED)
    ),
    *(
        Call("linear_cross_entropy", {"reduction": reduction} | chunks)
        for reduction in ("mean", "none")
        for chunks in (ONE_CHUNK, SEVERAL_CHUNKS)
    ),
    Call("linear_cross_entropy", {"workspace": ROWS // 4 * LONG * 2}, LONG),
    *map(Call, ("log_probs", "linear_log_probs", "divergence", "linear_divergence")),
    Call("log_probs", {"support": True}),
]
