"""A job on an Apple GPU: the Metal kernels for its rows, and PyTorch's own operations for what is around them."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.metal import tensors
from xent.backends.metal.failures import KernelError, warn_once
from xent.backends.metal.tensors import RowResults, RowTensors
from xent.backends.torch.job import STARTERS
from xent.backends.torch.plain import PlainPass
from xent.backends.torch.plain_job import PlainJob
from xent.backends.torch.steps import scale

__all__ = ["MetalJob", "MetalPass"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class MetalPass:
    """A `xent.backends.torch.plain_job.RowPass` over the rows of one call; PyTorch's where a kernel does not run."""

    def __init__(self, facts: Any, results: Any) -> None:
        self.facts, self.results = facts, results
        self._dead = torch.zeros_like(facts.ignored) if facts.dead is None else facts.dead
        self._class_weight = None if facts.class_weight is None else facts.class_weight.contiguous()
        stats = (results.lse, results.nll, results.entropy, results.predictions)
        self._plain = results.log_sum_sq_probs is not None or results.mean_logit is not None
        """Whether PyTorch's own operations have to take the rows: the kernels do not compute all that is asked for."""
        self._skips_dead = all(result is None for result in stats)

    def forward(self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None = None) -> None:
        """Take a block of rows: see `xent.backends.torch.plain_job.RowPass.forward`."""
        if not len(logits):
            return
        if self._plain:
            PlainPass(self.facts, self.results).forward(logits, start, grad, target_logits)
            return
        part, found = slice(start, start + len(logits)), self.results
        derived = found.lse is not None or found.z_term is not None
        if found.norm is not None:
            norm = found.norm[:, part]
        else:
            norm = found.loss.new_empty(2, len(logits)) if derived else None

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[part]

        results = RowResults(
            found.loss[part], norm, some(found.nll), some(found.entropy), some(found.predictions), grad
        )
        try:
            tensors.forward(logits, self._rows(part, target_logits), results, self._skips_dead)
        except KernelError as error:
            warn_once(error, "PyTorch")
            PlainPass(self.facts, found).forward(logits, start, grad, target_logits)
            return
        if norm is not None and derived:
            self._derive(norm[0], norm[1], part)

    def backward(self, logits: Tensor, start: int, grad: Tensor, target_logits: Tensor | None = None) -> None:
        """Write a block's gradient: see `xent.backends.torch.plain_job.RowPass.backward`."""
        if not len(logits):
            return
        part = slice(start, start + len(logits))
        try:
            tensors.backward(logits, self._rows(part, target_logits), self.results.norm[:, part], grad)
        except KernelError as error:
            warn_once(error, "PyTorch")
            PlainPass(self.facts, self.results).backward(logits, start, grad, target_logits)

    def _derive(self, peaks: Tensor, log_sums: Tensor, part: slice) -> None:
        """Record what follows from the norm."""
        lse = torch.where(peaks == -torch.inf, peaks, peaks + log_sums)
        if self.results.lse is not None:
            self.results.lse[part] = lse
        if self.results.z_term is not None:
            term = self.facts.weight[part] * self.facts.spec.z_loss * lse.square()
            self.results.z_term[part] = term.masked_fill(self._dead[part], 0)

    def _rows(self, part: slice, target_logits: Tensor | None) -> RowTensors:
        facts, spec = self.facts, self.facts.spec
        probabilities = None
        if facts.target is None:
            probabilities = facts.probability_block(part.start, part.stop)
            probabilities = probabilities if probabilities.dtype in _FLOATS else probabilities.float()
            probabilities = probabilities if probabilities.stride(-1) == 1 else probabilities.contiguous()
        return RowTensors(
            label_smoothing=spec.label_smoothing,
            z_loss=spec.z_loss,
            softcap=spec.softcap,
            logit_scale=spec.logit_scale,
            target=None if facts.target is None else facts.target[part],
            target_logits=target_logits,
            probabilities=probabilities,
            class_weight=self._class_weight,
            total_weight=None if self._class_weight is None else facts.class_weight_total,
            weight=facts.weight[part],
            scale=facts.scale[part],
            dead=self._dead[part],
        )


class MetalJob(PlainJob):
    """See `xent.backends.torch.job.Job`."""

    row_pass = MetalPass


STARTERS["metal"] = MetalJob, scale
