"""`linear_cross_entropy` in PyTorch: make a chunk's logits, let the row kernel overwrite them with their gradient,
multiply it back, go on to the next chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts, gather_facts
from xent.backends.torch.kernels import row_kernel
from xent.backends.torch.options import Options
from xent.backends.torch.results import Results, new_results, scattered
from xent.backends.torch.weight_gradient import WeightGradient
from xent.core.chunks import rows_per_chunk

__all__ = ["Linear", "backward", "forward"]


@dataclass(frozen=True, eq=False)
class Linear:
    """The classifier's side of a call, and which gradients somebody asked for."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    shift: int
    workspace: int | None
    compute: torch.dtype
    needs: tuple[bool, bool, bool]
    """Gradients of input, weight, bias."""


def forward(linear: Linear, options: Options, keep_norm: bool) -> tuple[Facts, Results, list[Tensor]]:
    """Return facts and results of all rows and, unless the norm is kept for backward, the gradients (empty: not needed)."""
    facts = gather_facts(options, linear.weight.shape[0], linear.compute, linear.shift)
    active = _active_rows(facts)
    some = facts if active is None else facts.select(active)
    results = new_results(some, keep_norm)
    run = row_kernel(options.kernel)(some, results)
    chunks = _Chunks(linear, active, len(some.weight))
    gradients = _Gradients(linear, active, not keep_norm)
    for start, hidden, logits, last in chunks:
        run.forward(logits, start, logits if gradients.any else None)
        gradients.add(start, hidden, logits, last)
    if active is not None:
        results = scattered(results, active, len(facts.weight))
    return facts, results, gradients.result()


def backward(upstream: Tensor, linear: Linear, norm: Tensor, options: Options) -> list[Tensor]:
    """Return the gradients for `upstream`, that of the rows' losses, from logits made again chunk by chunk."""
    facts = gather_facts(options, linear.weight.shape[0], linear.compute, linear.shift, upstream)
    active = _active_rows(facts)
    some = facts if active is None else facts.select(active)
    run = row_kernel(options.kernel)(some, Results(some.weight, norm if active is None else norm[:, active]))
    gradients = _Gradients(linear, active, True)
    for start, hidden, logits, last in _Chunks(linear, active, len(some.weight)):
        run.backward(logits, start, logits)
        gradients.add(start, hidden, logits, last)
    return gradients.result()


def _active_rows(facts: Facts) -> Tensor | None:
    """Return the rows that have to be computed, (M,) int64, or None for all.

    To know how many they are takes a look at values, which would synchronise an accelerator: so only on the CPU.
    """
    if facts.weight.device.type != "cpu":
        return None
    # Statistics are due for every row with a target, even one of weight 0.
    idle = facts.ignored if facts.spec.stats or facts.dead is None else facts.dead
    return (~idle).nonzero()[:, 0] if bool(idle.any()) else None


class _Chunks:
    """Yields (first row, hidden states (R, D), logits (R, V), whether it is the last), in the compute dtype."""

    def __init__(self, linear: Linear, active: Tensor | None, count: int) -> None:
        self._linear, self._active, self._count = linear, active, count

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor, bool]]:
        linear, compute = self._linear, self._linear.compute
        weight = linear.weight.to(compute)
        bias = None if linear.bias is None else linear.bias.to(compute)
        flat = linear.input.reshape(-1, linear.input.shape[-1])
        vocabulary, device = weight.shape[0], weight.device
        step = rows_per_chunk(self._count, vocabulary, compute.itemsize, linear.workspace, device.type)
        memory = torch.empty(min(step, self._count), vocabulary, dtype=compute, device=device)
        for start in range(0, self._count, step):
            stop = min(start + step, self._count)
            hidden = flat[start:stop] if self._active is None else flat[self._active[start:stop]]
            hidden = hidden.to(compute)
            logits = memory[: stop - start]
            if bias is None:
                torch.mm(hidden, weight.t(), out=logits)
            else:
                torch.addmm(bias, hidden, weight.t(), out=logits)
            yield start, hidden, logits, stop == self._count


class _Gradients:
    """Gathers the gradients that were asked for from the gradients of chunks of logits."""

    def __init__(self, linear: Linear, active: Tensor | None, wanted: bool) -> None:
        self._linear, self._active = linear, active
        self._needs_input, self._needs_weight, self._needs_bias = (wanted and need for need in linear.needs)
        self.any = self._needs_input or self._needs_weight or self._needs_bias
        source, weight = linear.input, linear.weight
        if self._needs_input:
            shape = (source.shape[:-1].numel(), source.shape[-1])
            make = torch.empty if active is None else torch.zeros
            self._input = make(shape, dtype=source.dtype, device=source.device)
            self._weight_compute = weight.to(linear.compute)
        self._weight = WeightGradient(weight.shape, linear.compute, weight.dtype, weight.device)
        if self._needs_bias:
            wide = torch.float64 if linear.compute == torch.float64 else torch.float32
            self._bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device)

    def add(self, start: int, hidden: Tensor, grad_logits: Tensor, last: bool) -> None:
        """Take a chunk's hidden states and the gradient of its logits."""
        if self._needs_input:
            made = grad_logits @ self._weight_compute
            stop = start + len(made)
            if self._active is None:
                self._input[start:stop] = made
            else:
                self._input[self._active[start:stop]] = made.to(self._input.dtype)
        if self._needs_weight:
            self._weight.add(grad_logits, hidden, last)
        if self._needs_bias:
            self._bias += grad_logits.sum(0, dtype=self._bias.dtype)

    def result(self) -> list[Tensor]:
        """Return the gradients of input, weight and bias; an empty tensor for one that nobody asked for."""
        source, weight, bias = self._linear.input, self._linear.weight, self._linear.bias
        return [
            self._input.view(source.shape) if self._needs_input else source.new_empty(0),
            self._weight.result() if self._needs_weight else weight.new_empty(0),
            self._bias.to(bias.dtype) if self._needs_bias and bias is not None else weight.new_empty(0),
        ]
