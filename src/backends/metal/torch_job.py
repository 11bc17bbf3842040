"""A job on an Apple GPU: the Metal kernels compute its rows, and PyTorch's own operations the rest."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from xent.backends.metal import tensors
from xent.backends.metal.failures import KernelError, warn_once
from xent.backends.metal.tensors import RowResults, RowTensors
from xent.backends.torch.facts import Facts
from xent.backends.torch.job import STARTERS
from xent.backends.torch.plain import PlainPass
from xent.backends.torch.plain_job import PlainJob
from xent.backends.torch.results import Results
from xent.backends.torch.steps import scale

__all__ = ["MetalJob", "MetalPass"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_STATISTICS = ("nll", "entropy", "predictions", "log_sum_sq_probs", "mean_logit")
"""The results per row that a kernel computes, besides the loss and the norm."""


class MetalPass:
    """A `xent.backends.torch.plain_job.RowPass` with the Metal kernels, or PyTorch's if a kernel cannot run."""

    def __init__(self, facts: Facts, results: Results) -> None:
        self.facts, self.results = facts, results
        self._dead = torch.zeros_like(facts.weight, dtype=torch.bool) if facts.dead is None else facts.dead
        self._class_weight = None if facts.class_weight is None else facts.class_weight.contiguous()
        stats = (getattr(results, name) for name in ("lse", *_STATISTICS))
        self._skips_dead = all(result is None for result in stats)

    def forward(self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None = None) -> None:
        """Compute a block of rows: see `xent.backends.torch.plain_job.RowPass.forward`.

        If statistics have upstream gradients, the gradient is a second launch, because it needs the entropy.
        """
        if not len(logits):
            return
        part, found = slice(start, start + len(logits)), self.results
        upstream = None if grad is None else self.facts.upstream
        derived = found.lse is not None or found.z_term is not None
        norm = None if found.norm is None else found.norm[:, part]
        if norm is None and (derived or upstream is not None):
            norm = found.loss.new_empty(2, len(logits))
        places = {name: getattr(found, name) for name in _STATISTICS}
        named = {name: None if place is None else place[part] for name, place in places.items()}
        if named["entropy"] is None and upstream is not None and upstream.entropy is not None:
            named["entropy"] = torch.empty_like(found.loss[part])
        together = None if upstream is not None else grad
        try:
            rows = self._rows(part, target_logits)
            with _in_its_dtype(together, logits) as place:
                results = RowResults(found.loss[part], norm, **named, grad=place)
                tensors.forward(logits, rows, results, self._skips_dead)
            if upstream is not None and grad is not None and norm is not None:
                self._backward(logits, rows, norm, part, named["entropy"], grad)
        except KernelError as error:
            warn_once(error, "PyTorch")
            PlainPass(self.facts, found).forward(logits, start, grad, target_logits)
            return
        if norm is not None and derived:
            self._derive(norm[0], norm[1], part)

    def backward(self, logits: Tensor, start: int, grad: Tensor) -> None:
        """Write a block's gradient: see `xent.backends.torch.plain_job.RowPass.backward`."""
        if not len(logits):
            return
        part, norm, entropy = slice(start, start + len(logits)), self.results.norm, self.results.entropy
        assert norm is not None
        try:
            rows = self._rows(part, None)
            self._backward(logits, rows, norm[:, part], part, None if entropy is None else entropy[part], grad)
        except KernelError as error:
            warn_once(error, "PyTorch")
            PlainPass(self.facts, self.results).backward(logits, start, grad)

    def _backward(
        self, logits: Tensor, rows: RowTensors, norm: Tensor, part: slice, entropy: Tensor | None, grad: Tensor
    ) -> None:
        """Write a block's gradient from its norm (2, R), and from the entropy (R,) if it has an upstream gradient."""
        upstream, stacked = self.facts.upstream, None
        if upstream is not None:
            given = (*(None if one is None else one[part] for one in upstream[1:]), entropy)
            nothing = torch.zeros_like(norm[0])
            stacked = torch.stack([nothing if values is None else values.to(nothing) for values in given], -1)
        with _in_its_dtype(grad, logits) as place:
            assert place is not None
            tensors.backward(logits, rows, norm, stacked, place)

    def _derive(self, peaks: Tensor, log_sums: Tensor, part: slice) -> None:
        """Record the results that follow from the norm."""
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
            bend=None if facts.bend is None else facts.bend[part],
            weight=facts.weight[part],
            scale=facts.scale[part],
            dead=self._dead[part],
        )


@contextmanager
def _in_its_dtype(grad: Tensor | None, logits: Tensor) -> Iterator[Tensor | None]:
    """Yield memory in the logits' dtype for the kernel's gradient; at the end convert it to the dtype of `grad`."""
    if grad is None or grad.dtype == logits.dtype:
        yield grad
        return
    place = torch.empty_like(logits)
    yield place
    grad.copy_(place)


class MetalJob(PlainJob):
    """See `xent.backends.torch.job.Job`. `xent.backends.torch.sampled.SupportPass` computes rows with a support."""

    row_pass = MetalPass


STARTERS["metal"] = MetalJob, scale
