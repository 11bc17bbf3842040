"""A row pass with Triton's kernels: the ring where it serves, else the plain kernel, and the sizes of its blocks."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.triton.launch import cdiv, launch, next_power_of_2
from xent.backends.triton.ring import launch_ring, programs_a_row
from xent.backends.triton.rows_kernel import rows_kernel

__all__ = ["TritonPass"]

_LANE = 8  # elements: 16 bytes of the 16-bit dtypes
_ALIGNED = 16  # elements, as Triton sees it
_KIB = 1024
_UNALIGNED = 8 * _KIB, 4  # bytes of a block, and warps, for rows that are read element by element


def _block(row: int, looks_again: bool) -> tuple[int, int]:
    """Return the bytes of a block and its warps, for rows of so many bytes, read by vectors.

    A second look at a row should find it in the L1 cache: three programs, as many as fit on a multiprocessor with
    16 KiB and 8 warps, share its 256 KiB. Longer rows are read again from L2, by few programs with many loads each.
    """
    if row <= 16 * _KIB:
        return 8 * _KIB, 4
    if looks_again and row > 128 * _KIB:
        return 32 * _KIB, 32
    return 16 * _KIB, 8


class TritonPass:
    """A `xent.backends.protocol.RowPass` over the rows of one call."""

    def __init__(self, facts: Any, results: Any) -> None:
        self.facts, self.results = facts, results
        self._dead = torch.zeros_like(facts.ignored) if facts.dead is None else facts.dead
        self._norm: Tensor | None = results.norm
        self._class_weight = None if facts.class_weight is None else facts.class_weight.contiguous()
        stats = (results.lse, results.nll, results.entropy, results.predictions)
        self._skips_dead = all(result is None for result in stats)

    def forward(self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None = None) -> None:
        """Take a block of rows: see `xent.backends.protocol.RowPass.forward`."""
        if not len(logits):
            return
        group = None if grad is None else programs_a_row(logits, grad, self.facts, self.results)
        if grad is not None and group is not None:
            launch_ring(group, logits, start, grad, target_logits, self.facts, self.results)
        elif grad is not None and self._in_two_passes(logits):
            self._launch(logits, start, None, target_logits, forward=True)
            self._launch(logits, start, grad, target_logits, forward=False)
        else:
            self._launch(logits, start, grad, target_logits, forward=True)

    def backward(self, logits: Tensor, start: int, grad: Tensor, target_logits: Tensor | None = None) -> None:
        """Write a block's gradient: see `xent.backends.protocol.RowPass.backward`."""
        if len(logits):
            self._launch(logits, start, grad, target_logits, forward=False)

    def _in_two_passes(self, logits: Tensor) -> bool:
        """Whether loss and gradient have a launch each: faster for long rows that are read element by element."""
        vocabulary = logits.shape[1]
        if self.facts.target is None or vocabulary % _ALIGNED == 0 or vocabulary * logits.itemsize <= _UNALIGNED[0]:
            return False
        if self._norm is None:
            self._norm = self.facts.weight.new_empty(2, len(self.facts.weight))
        return True

    def _launch(
        self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None, forward: bool
    ) -> None:
        facts, results, spec = self.facts, self.results, self.facts.spec
        count, vocabulary = logits.shape
        probabilities = None if facts.target is not None else facts.probability_block(start, start + count)
        split = not forward and facts.target is not None
        aligned = vocabulary % _ALIGNED == 0
        size, warps = _block(vocabulary * logits.itemsize, forward and grad is not None) if aligned else _UNALIGNED
        block = min(next_power_of_2(vocabulary), size // logits.itemsize)
        peaks, log_sums = (None, None) if self._norm is None else self._norm.unbind(0)
        launch(
            rows_kernel,
            (count * (cdiv(vocabulary, block) if split else 1),),
            logits,
            logits.stride(0),
            grad,
            0 if grad is None else grad.stride(0),
            start,
            facts.target,
            facts.weight,
            facts.scale,
            self._dead,
            target_logits,
            self._class_weight,
            None if facts.class_weight is None else facts.class_weight_total,
            probabilities,
            0 if probabilities is None else probabilities.stride(0),
            0 if probabilities is None else probabilities.stride(1),
            results.loss,
            peaks,
            log_sums,
            results.lse,
            results.nll,
            results.entropy,
            results.predictions,
            results.z_term,
            vocabulary,
            1 - spec.label_smoothing,
            spec.label_smoothing / facts.vocabulary,
            spec.z_loss,
            spec.softcap or 0.0,
            spec.logit_scale,
            SKIPS_DEAD=self._skips_dead,
            FORWARD=forward,
            SPLIT=split,
            SMOOTHED=spec.label_smoothing != 0,
            Z_LOSS=spec.z_loss != 0,
            CAPPED=spec.softcap is not None,
            SCALED=spec.logit_scale != 1,
            BLOCK=block,
            LANES=max(block // _LANE, 1),
            ALIGNED=aligned,
            num_warps=min(max(block * logits.itemsize // 1024, 1), warps),
        )
