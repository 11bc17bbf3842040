"""A job in PyTorch's own operations, on every device: `xent.backends.torch.job.Job`."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts, gather_facts
from xent.backends.torch.job import STARTERS, Taken, Upstream
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.torch.plain import PlainPass
from xent.backends.torch.results import Results, new_results, scattered
from xent.backends.torch.rows import logit_blocks
from xent.backends.torch.sampled import SupportPass
from xent.backends.torch.schedule import Part
from xent.backends.torch.steps import reduced, scale, target_logits

__all__ = ["PlainJob", "RowPass"]


class RowPass(Protocol):
    """One pass over the rows of one call, made from facts and results: takes blocks of logits in any order."""

    def forward(self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None = None) -> None:
        """Take rows [start, start + R): record their losses, statistics and norm; write their gradient where asked.

        `logits` is an (R, V) block whose last axis is contiguous. `grad` is None, or where the gradient of the
        (reduced) loss goes: an (R, V) block of the logits' dtype, which may be `logits` itself. `target_logits` (R,),
        in the accumulation dtype, replace the targets' raw logits, which were rounded to a low precision.
        """

    def backward(self, logits: Tensor, start: int, grad: Tensor, target_logits: Tensor | None = None) -> None:
        """Write the gradient of rows [start, start + R) from the recorded norm; `grad` may be `logits` itself."""


class PlainJob:
    """See `xent.backends.torch.job.Job`. The facts of all rows are gathered when it starts."""

    row_pass: Callable[[Facts, Results], RowPass] = PlainPass
    """What takes blocks of rows that may be of any class; a device's own kernels in a subclass."""

    def __init__(
        self, options: Options, vocabulary: int, dtype: torch.dtype, shift: int, upstream: Upstream | None, narrow: bool
    ) -> None:
        self.spec = options.spec
        self._facts = self._ordered = self.gather(options, vocabulary, dtype, shift, upstream, narrow)
        self.count = len(self._facts.weight)
        self.deferred = self._facts.deferred
        self._order: Tensor | None = None
        self._number = self.count
        self._results: Results | None = None
        self._pass: RowPass | None = None
        self._taken = self._facts

    def gather(
        self, options: Options, vocabulary: int, dtype: torch.dtype, shift: int, upstream: Upstream | None, narrow: bool
    ) -> Facts:
        """Return the facts of all rows."""
        return gather_facts(options, vocabulary, dtype, shift, upstream, narrow)

    def _start_pass(self, facts: Facts, results: Results) -> RowPass:
        return self.row_pass(facts, results) if facts.support is None else SupportPass(facts, results)

    def partition(self, several: bool) -> tuple[Tensor | None, int | Tensor]:
        """Put the rows to compute first."""
        idle = self._facts.idle
        if idle is None:
            return None, self.count
        if idle.device.type == "cpu":
            if not bool(idle.any()):
                return None, self.count
            order, number = idle.argsort(stable=True), int((~idle).sum())
            self._order, self._number, self._ordered = order, number, self._facts.select(order[:number])
            return order, number
        if not several or idle.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None, self.count
        self._order = idle.argsort(stable=True)
        self._ordered = self._facts.select(self._order)
        return self._order, (~idle).sum()

    def learn(self, number: int) -> None:
        """Return to the call's order where all rows are computed; results so far are in it: the sort is stable."""
        self._number = number
        if number == self.count:
            self._order, self._ordered = None, self._facts

    def logits(self, logits: Tensor, grad: Tensor | None, norm: Tensor | None) -> None:
        """Take all rows of (..., V) logits."""
        self._results = new_results(self._facts, norm)
        run = self._start_pass(self._facts, self._results)
        for start, block, out in logit_blocks(logits, grad):
            run.forward(block, start, out)

    def gradient(self, logits: Tensor, grad: Tensor, norm: Tensor | None, entropy: Tensor | None) -> None:
        """Write the gradient of all rows of (..., V) logits, from their norm where there is one."""
        if norm is None:
            self.logits(logits, grad, None)
            return
        run = self._start_pass(self._facts, Results(loss=self._facts.weight, norm=norm, entropy=entropy))
        for start, block, out in logit_blocks(logits, grad):
            assert out is not None
            run.backward(block, start, out)

    def take(self, linear: Linear, part: Part) -> Taken:
        """Return the hidden states of a part, and its target logits where the compute dtype rounds them."""
        facts, rows = self._ordered, slice(part.start, part.stop)
        hidden = linear.hidden[rows] if part.rows is None else linear.hidden[part.rows]
        hidden = hidden.to(linear.compute)
        trained, dead = hidden, facts.dead
        if dead is not None:
            trained = hidden.masked_fill(dead[rows, None], 0)
        found = None
        if facts.target is not None and linear.compute.itemsize == 2:
            found = target_logits(hidden, linear.classifier, linear.classifier_bias, facts.target[rows])
        return Taken(hidden, trained, found)

    def chunk(self, logits: Tensor, part: Part, grad: Tensor | None, target_logits: Tensor | None) -> None:
        """Take a part's logits (R, V)."""
        if self._results is None:
            self._results = new_results(self._ordered)
        if self._pass is None or self._taken is not self._ordered:
            self._pass, self._taken = self._start_pass(self._ordered, self._results), self._ordered
        self._pass.forward(logits, part.start, grad, target_logits)

    def tiles(self, linear: Linear, norm: Tensor | None) -> bool:
        """Whole rows are as good here: return False."""
        return False

    def new_norm(self, linear: Linear) -> Tensor | None:
        """Return None: gradients are made from logits."""
        return None

    def multiply(
        self, linear: Linear, taken: Taken, part: Part, grad: Tensor, norm: Tensor, entropy: Tensor | None
    ) -> None:
        """Raise: there is never a norm."""
        raise NotImplementedError

    def finish(self) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the statistics."""
        facts: Facts = self._facts
        results = self._results or new_results(self._ordered)
        if self._order is not None:
            results = scattered(results, self._order[: self._number], self.count)
        return reduced(results.loss, facts), results.stats(facts, reduced)


STARTERS["torch"] = PlainJob, scale
