"""A `xent.backends.torch.job.Job` whose steps are launches of Triton kernels."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.job import STARTERS, Taken, Upstream
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.torch.schedule import Part
from xent.backends.triton.facts import Facts
from xent.backends.triton.facts_kernels import partition_kernel
from xent.backends.triton.geometry import geometry
from xent.backends.triton.hopper.product import gradient_product
from xent.backends.triton.launch import cdiv, launch
from xent.backends.triton.linear_launches import launch_coefficients, launch_finish, launch_take, scale
from xent.backends.triton.results import Results
from xent.backends.triton.row_launches import (
    Block,
    blocks_of,
    launch_gradient,
    launch_probabilities,
    launch_rows,
    launch_support,
)
from xent.backends.triton.tiles import fold, stores_no_logits

__all__ = ["TritonJob"]


class TritonJob:
    """See `xent.backends.torch.job.Job`."""

    def __init__(
        self, options: Options, vocabulary: int, dtype: torch.dtype, shift: int, upstream: Upstream | None, narrow: bool
    ) -> None:
        self.facts = facts = Facts(options, vocabulary, shift, upstream, narrow)
        self.results = Results(facts)
        self.spec, self.count, self.device = facts.spec, facts.count, facts.device
        self.deferred = facts.scratch[2] if narrow and facts.scratch is not None else None
        self._order: Tensor | None = None

    def _empty(self, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def partition(self, several: bool) -> tuple[Tensor | None, int | Tensor]:
        """Move the rows that must be computed to the front, in one launch."""
        facts, on_host = self.facts, self.device.type == "cpu"
        if not self.count or not (on_host or (several and not torch.cuda.is_current_stream_capturing())):
            return None, self.count
        order, number = self._empty(self.count, torch.int64), self._empty((), torch.int64)
        launch(
            partition_kernel,
            max(min(cdiv(self.count, 1024), 64), 1),
            (
                facts.target,
                facts.sample_weight,
                facts.class_weight,
                order,
                number,
                *facts.rows,
            ),
            {"SHIFTED": facts.shift > 0, "ALL_ROWS": facts.all_rows, "COUNTED": 8192, "BLOCK": 1024},
            num_warps=8,
        )
        if on_host and int(number) == self.count:
            return None, self.count
        self._order, self.results.partial = order, True
        return order, int(number) if on_host else number

    def learn(self, number: int) -> None:
        """Return to the order of the call if all rows are computed."""
        if number == self.count:
            self._order, self.results.partial = None, False

    def logits(self, logits: Tensor, grad: Tensor | None, norm: Tensor | None) -> None:
        """Compute all rows of logits (..., V)."""
        for block in blocks_of(logits, grad):
            self._take_rows(block, norm)

    def chunk(self, logits: Tensor, part: Part, grad: Tensor | None, target_logits: Tensor | None) -> None:
        """Compute the rows of a part."""
        place = geometry(logits, grad)
        assert place is not None
        self._take_rows(Block(logits, grad, place, part.start, self._order, target_logits), None)

    def _take_rows(self, block: Block, norm: Tensor | None) -> None:
        if self.facts.probabilities is not None:
            launch_probabilities(self.facts, self.results, block)
        elif self.facts.support is not None:
            launch_support(self.facts, self.results, block)
        else:
            launch_rows(self.facts, self.results, block, norm)

    def gradient(self, logits: Tensor, grad: Tensor, norm: Tensor | None, entropy: Tensor | None) -> None:
        """Write the gradient of all rows of logits (..., V), from their norm if it is given."""
        if norm is None or self.facts.probabilities is not None or self.facts.support is not None:
            self.logits(logits, grad, None)
            return
        for block in blocks_of(logits, grad):
            launch_gradient(self.facts, block, norm, entropy)

    def take(self, linear: Linear, part: Part) -> Taken:
        """Return the hidden states of a part, and its target logits."""
        facts, order = self.facts, self._order
        rows, width = part.stop - part.start, linear.hidden.shape[1]
        target_logits = None if facts.probabilities is not None else self._empty(rows)
        trained = torch.empty(rows, width, dtype=linear.compute, device=self.device)
        if not facts.all_rows or facts.statistics or (facts.sample_weight is None and not facts.mean):
            launch_take(facts, order, linear, part, target_logits, trained)
            return Taken(trained, trained, target_logits)
        # Rows without a gradient still have statistics, which need their real hidden states.
        if linear.needs[1]:
            launch_take(facts, order, linear, part, None, trained)
        if target_logits is not None:
            launch_take(facts, order, linear, part, target_logits, None)
        taken = linear.hidden[part.start : part.stop] if part.rows is None else linear.hidden[part.rows]
        return Taken(taken.to(linear.compute), trained, target_logits)

    def new_norm(self, linear: Linear) -> Tensor | None:
        """Return a buffer for the norm if the products for Hopper GPUs serve the call."""
        return self._empty((3, self.count)) if stores_no_logits(linear, self.facts) else None

    def multiply(
        self, linear: Linear, taken: Taken, part: Part, grad: Tensor, norm: Tensor, entropy: Tensor | None
    ) -> None:
        """Write the gradient of a part's logits from the norm, without storing logits."""
        facts, rows = self.facts, part.stop - part.start
        made, classes = self._empty((4, rows)), self._empty(rows, torch.int32)
        assert taken.target_logits is not None
        launch_coefficients(facts, self._order, part, taken.target_logits, norm, entropy, made, classes)
        tilted = facts.upstream.entropy is not None
        gradient_product(taken.hidden, linear.classifier, facts.spec, classes, made, grad, tilted)

    def tiles(self, linear: Linear, norm: Tensor | None) -> bool:
        """Compute the results of all rows without storing their logits. Return False for probabilities and supports."""
        facts = self.facts
        if facts.probabilities is not None or facts.support is not None:
            return False
        if self.count:
            target_logits, classes = self._empty(self.count), self._empty(self.count, torch.int32)
            whole = Part(0, self.count, None, True)
            launch_take(facts, self._order, linear, whole, target_logits, None, classes)
            sums = fold(linear, facts, classes)
            launch_finish(facts, self.results, sums, target_logits, norm)
        return True

    def finish(self) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the statistics."""
        return self.results.finish()


STARTERS["triton"] = TritonJob, scale
