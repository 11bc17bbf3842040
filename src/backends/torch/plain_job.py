"""`PlainJob`: a `xent.backends.torch.job.Job` that works on every device, with PyTorch's own operations."""

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
from xent.backends.torch.rows import cast, logit_blocks, span
from xent.backends.torch.sampled import SupportPass
from xent.backends.torch.schedule import Part
from xent.backends.torch.steps import reduced, scale, target_logits

__all__ = ["PlainJob", "RowPass"]


class RowPass(Protocol):
    """One pass over the rows of a call, in blocks of logits in any order. It is created from facts and results."""

    def forward(self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None = None) -> None:
        """Compute rows [start, start + R): record losses, statistics and norm, and write the gradient if needed.

        `logits` is (R, V) with a contiguous last axis. `grad` is None or the memory for the gradient of the reduced
        loss, (R, V) in the logits' dtype; it may be `logits` itself. `target_logits` (R,), in the accumulation dtype,
        replace the targets' raw logits, which have been rounded to the dtype of `logits`.
        """

    def backward(self, logits: Tensor, start: int, grad: Tensor) -> None:
        """Write the gradient of rows [start, start + R) from the recorded norm; `grad` may be `logits` itself."""


class PlainJob:
    """See `xent.backends.torch.job.Job`. The facts of all rows are gathered when it starts."""

    row_pass: Callable[[Facts, Results], RowPass] = PlainPass
    """The row pass to use; a subclass replaces it by one with a device's own kernels."""

    def __init__(
        self, options: Options, vocabulary: int, dtype: torch.dtype, shift: int, upstream: Upstream | None, narrow: bool
    ) -> None:
        self.spec = options.spec
        self._facts = self._ordered = self.gather(options, vocabulary, dtype, shift, upstream, narrow)
        self.count = self._facts.scale.shape[0]
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
        """Move the rows to compute to the front."""
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
        """Return to the call's order if all rows are computed. The results so far are in it, as the sort is stable."""
        self._number = number
        if number == self.count:
            self._order, self._ordered = None, self._facts

    def logits(self, logits: Tensor, grad: Tensor | None, norm: Tensor | None) -> None:
        """Compute all rows of logits (..., V)."""
        self._results = new_results(self._facts, norm)
        run = self._start_pass(self._facts, self._results)
        for start, block, out in logit_blocks(logits, grad):
            run.forward(block, start, out)

    def gradient(self, logits: Tensor, grad: Tensor, norm: Tensor | None, entropy: Tensor | None) -> None:
        """Write the gradient of all rows of logits (..., V), from their norm if it is given."""
        if norm is None:
            self.logits(logits, grad, None)
            return
        run = self._start_pass(self._facts, Results(self._facts.scale, norm=norm, entropy=entropy))
        for start, block, out in logit_blocks(logits, grad):
            assert out is not None
            run.backward(block, start, out)

    def take(self, linear: Linear, part: Part) -> Taken:
        """Gather the hidden states of a part, and compute its target logits if the compute dtype is 16-bit."""
        facts, rows = self._ordered, slice(part.start, part.stop)
        hidden = span(linear.hidden, part.start, part.stop) if part.rows is None else linear.hidden[part.rows]
        hidden = cast(hidden, linear.compute)
        trained, dead = hidden, facts.dead
        if dead is not None:
            trained = hidden.masked_fill(dead[rows, None], 0)
        found = None
        if facts.target is not None and linear.compute.itemsize == 2:
            found = target_logits(hidden, linear.classifier, linear.classifier_bias, facts.target[rows])
        return Taken(hidden, trained, found)

    def chunk(self, logits: Tensor, part: Part, grad: Tensor | None, target_logits: Tensor | None) -> None:
        """Compute the logits (R, V) of a part."""
        if self._results is None:
            self._results = new_results(self._ordered)
        if self._pass is None or self._taken is not self._ordered:
            self._pass, self._taken = self._start_pass(self._ordered, self._results), self._ordered
        self._pass.forward(logits, part.start, grad, target_logits)

    def tiles(self, linear: Linear, norm: Tensor | None) -> bool:
        """Return False: whole rows are as fast here."""
        return False

    def new_norm(self, linear: Linear) -> Tensor | None:
        """Return None: gradients are computed from logits."""
        return None

    def multiply(
        self, linear: Linear, taken: Taken, part: Part, grad: Tensor, norm: Tensor, entropy: Tensor | None
    ) -> None:
        """Raise an error: it is never called, since `new_norm` returns None."""
        raise NotImplementedError

    def finish(self) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the statistics."""
        facts: Facts = self._facts
        results = self._results or new_results(self._ordered)
        if self._order is not None:
            results = scattered(results, self._order[: self._number], self.count)
        return reduced(results.loss, facts), results.stats(facts, reduced) if facts.spec.stats else []


STARTERS["torch"] = PlainJob, scale
