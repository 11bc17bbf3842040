"""The per-row results of a call, in buffers that kernels write to, and the loss and statistics computed from them."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.triton.facts import Facts
from xent.backends.triton.launch import launch
from xent.backends.triton.linear_kernels import sums_kernel

__all__ = ["Results"]


class Results:
    """Results of N rows. A buffer is allocated when the first launch that writes to it needs it."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._made: dict[str, Tensor | None] = {}
        self._held: Tensor | None = None
        self.partial = False
        """Whether rows may be skipped. Their results are 0, or -1 for predictions."""

    def _each(self, name: str, wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Return the buffer (N,) of a result; None if it is not wanted."""
        if name not in self._made:
            made = None
            if wanted:
                made = torch.empty(self._facts.count, dtype=dtype, device=self._facts.device)
                if self.partial:
                    made.fill_(-1 if name == "predictions" else 0)
            self._made[name] = made
        return self._made[name]

    @property
    def loss(self) -> Tensor:
        """The loss of each row, (N,) float32."""
        loss = self._each("loss", True)
        assert loss is not None
        return loss

    @property
    def statistics(self) -> tuple[Tensor | None, ...]:
        """The buffers of the statistics, (N,) each or None, in the order of kernel arguments."""
        names = self._facts.spec.stats
        return (
            self._each("lse", "lse" in names),
            self._each("nll", "nll" in names),
            self._each("entropy", "entropy" in names),
            self._each("predictions", "predictions" in names, torch.int64),
            self._each("hits", "accuracy" in names),
            self._each("z_term", "z_loss" in names),
            self._each("log_sum_sq_probs", "log_sum_sq_probs" in names),
            self._each("mean_logit", "mean_logit" in names),
        )

    def held(self, entries: int) -> Tensor:
        """Return a buffer (entries,) for gradients of (row, class) pairs; the same for all launches."""
        if self._held is None:
            self._held = torch.empty(entries, dtype=torch.float32, device=self._facts.device)
        return self._held

    def finish(self) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the statistics."""
        facts, made = self._facts, self._made
        names, each_row = facts.spec.stats, facts.spec.reduction == "none"
        of_rows = facts.spec.accuracy_of_rows
        loss = self.loss
        _ = self.statistics  # allocates the buffers if there was no launch
        total = loss if each_row else self._one()
        total_z = self._one() if "z_loss" in names and not each_row else None
        accuracy = self._one() if "accuracy" in names and not of_rows else None
        if not each_row or accuracy is not None:
            launch(
                sums_kernel,
                1,
                (
                    loss,
                    made.get("z_term"),
                    made.get("hits"),
                    facts.scratch if facts.spec.reduction == "mean" else None,
                    facts.counted,
                    None if each_row else total,
                    total_z,
                    accuracy,
                    facts.count,
                ),
                {"BLOCK": 4096},
                num_warps=16,
            )
        found: dict[str, Any] = {
            **made,
            "z_loss": made.get("z_term") if each_row else total_z,
            "accuracy": made.get("hits") if of_rows else accuracy,
            "count": facts.counted,
        }
        return total, [found[name] for name in names]

    def _one(self) -> Tensor:
        return torch.empty((), dtype=torch.float32, device=self._facts.device)
