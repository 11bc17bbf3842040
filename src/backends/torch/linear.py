"""`linear_cross_entropy` in PyTorch: make a chunk's logits, overwrite them with their gradient, multiply it back."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts
from xent.backends.torch.kernels import Kernels, kernels
from xent.backends.torch.options import Options
from xent.backends.torch.results import Results, new_results, scattered
from xent.backends.torch.weight_gradient import WeightGradient, kept_dtype
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
    """Return facts and results of all rows, and gradients, unless the norm is kept for backward to make them."""
    chosen = kernels(options.kernel)
    facts = chosen.gather_facts(options, linear.weight.shape[0], linear.compute, linear.shift)
    active = _active_rows(facts)
    some = facts if active is None else facts.select(active)
    results = new_results(some, keep_norm)
    run = chosen.row_pass(some, results)
    gradients = _Gradients(linear, active, not keep_norm)
    for chunk in _chunks(linear, chosen, some, active):
        run.forward(chunk.logits, chunk.start, chunk.logits if gradients.any else None, chunk.target_logits)
        gradients.add(chunk)
    if active is not None:
        results = scattered(results, active, len(facts.weight))
    return facts, results, gradients.result()


def backward(upstream: Tensor, linear: Linear, norm: Tensor, options: Options) -> list[Tensor]:
    """Return the gradients for `upstream`, that of the rows' losses, from logits made again chunk by chunk."""
    chosen = kernels(options.kernel)
    facts = chosen.gather_facts(options, linear.weight.shape[0], linear.compute, linear.shift, upstream)
    active = _active_rows(facts)
    some = facts if active is None else facts.select(active)
    run = chosen.row_pass(some, Results(some.weight, norm if active is None else norm[:, active]))
    gradients = _Gradients(linear, active, True)
    for chunk in _chunks(linear, chosen, some, active):
        run.backward(chunk.logits, chunk.start, chunk.logits, chunk.target_logits)
        gradients.add(chunk)
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


@dataclass(frozen=True, eq=False)
class _Chunk:
    """R rows, in the compute dtype."""

    start: int
    hidden: Tensor
    """(R, D)"""
    logits: Tensor
    """(R, V), memory that the next chunk uses again."""
    target_logits: Tensor | None
    """(R,) float32, where the compute dtype rounds: most of the loss's error is the rounding of this one logit."""
    weight: Tensor
    """(V, D)"""
    dead: Tensor | None
    """(R,) rows whose hidden states must not reach the weight's gradient, not even as 0 * NaN."""
    last: bool


def _chunks(linear: Linear, chosen: Kernels, facts: Facts, active: Tensor | None) -> Iterator[_Chunk]:
    compute, count = linear.compute, len(facts.weight)
    weight = linear.weight.to(compute)
    bias = None if linear.bias is None else linear.bias.to(compute)
    flat = linear.input.reshape(linear.input.shape[:-1].numel(), linear.input.shape[-1])
    vocabulary, device = weight.shape[0], weight.device
    step = rows_per_chunk(count, vocabulary, compute.itemsize, linear.workspace, device.type)
    memory = torch.empty(min(step, count), vocabulary, dtype=compute, device=device)
    for start in range(0, count, step):
        stop = min(start + step, count)
        hidden = flat[start:stop] if active is None else flat[active[start:stop]]
        hidden = hidden.to(compute)
        logits = memory[: stop - start]
        if bias is None:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden, weight.t(), out=logits)
        target_logits = None
        if facts.target is not None and compute in (torch.bfloat16, torch.float16):
            target_logits = chosen.target_logits(hidden, weight, bias, facts.target[start:stop])
        dead = None if facts.dead is None else facts.dead[start:stop]
        yield _Chunk(start, hidden, logits, target_logits, weight, dead, stop == count)


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
            self._input = make(shape, dtype=kept_dtype(source.dtype), device=source.device)
        self._weight = WeightGradient(weight.shape, linear.compute, weight.dtype, weight.device)
        if self._needs_bias:
            wide = torch.float64 if linear.compute == torch.float64 else torch.float32
            self._bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device)

    def add(self, chunk: _Chunk) -> None:
        """Take a chunk whose logits hold their gradient by now."""
        if self._needs_input:
            made = chunk.logits @ chunk.weight
            rows = slice(chunk.start, chunk.start + len(made))
            if self._active is None:
                self._input[rows] = made
            else:
                self._input[self._active[rows]] = made.to(self._input.dtype)
        if self._needs_weight:
            hidden = chunk.hidden if chunk.dead is None else chunk.hidden.masked_fill(chunk.dead[:, None], 0)
            self._weight.add(chunk.logits, hidden, chunk.last)
        if self._needs_bias:
            self._bias += chunk.logits.sum(0, dtype=self._bias.dtype)

    def result(self) -> list[Tensor]:
        """Return the gradients of input, weight and bias; an empty tensor for one that nobody asked for."""
        source, weight, bias = self._linear.input, self._linear.weight, self._linear.bias
        return [
            self._input.view(source.shape) if self._needs_input else source.new_empty(0),
            self._weight.result() if self._needs_weight else weight.new_empty(0),
            self._bias.to(kept_dtype(bias.dtype)) if self._needs_bias and bias is not None else weight.new_empty(0),
        ]
