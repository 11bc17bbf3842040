"""The rows of one call on a shard of the vocabulary, before and after the collective of each part.

The rows to compute, and their split into parts, depend only on targets and weights, which are the same on all ranks.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts, accumulation_dtype, gather_facts
from xent.backends.torch.job import Taken, Upstream
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options, read
from xent.backends.torch.plain_job import PlainJob
from xent.backends.torch.results import new_results
from xent.backends.torch.schedule import Part
from xent.backends.torch.sharded.collectives import Flight, add_up, gather
from xent.backends.torch.sharded.finish import kept_names
from xent.backends.torch.sharded.layout import Layout
from xent.backends.torch.sharded.steps import STEPS, Coefficients, Landing, Shard, Steps, Weights
from xent.backends.torch.sharded.sums import Slots, slots_of

__all__ = ["Saved", "ShardJob"]


class Saved(NamedTuple):
    """Data that the backward pass gets from the forward pass."""

    kept: Tensor
    """(K, N): the fields that `kept_names` lists."""
    upstream: Upstream


class ShardJob(PlainJob):
    """A `xent.backends.torch.plain_job.PlainJob` whose parts wait for a collective between `fold` and `land`."""

    def __init__(
        self,
        options: Options,
        layout: Layout,
        dtype: torch.dtype,
        shift: int = 0,
        narrow: bool = False,
        saved: Saved | None = None,
    ) -> None:
        self.layout, self._kernel, self._saved = layout, options.kernel, saved
        self._given = options.target.is_floating_point()
        options = read(_without_padding(options, layout), always=True)
        self._kept_names = kept_names(list(options.spec.stats), self._given, options.weight is not None)
        self._names = slots_of(options.spec, self._given, options.support_ids is not None)
        self._weights: Weights | None = None
        super().__init__(options, layout.vocabulary, dtype, shift, None if saved is None else saved.upstream, narrow)
        self.kept: Tensor | None = None
        """(K, N): the fields for the backward pass that `kept_names` lists; None unless `keep` was called."""
        self._truth: Tensor | None = None
        self._steps_of: tuple[Facts, Steps] | None = None

    def keep(self, wanted: bool) -> None:
        """If wanted, store in `kept` the data that the backward pass needs. Call this before the first part."""
        if wanted:
            self.kept = self._facts.weight.new_zeros(len(self._kept_names), self.count)

    def gather(
        self, options: Options, vocabulary: int, dtype: torch.dtype, shift: int, upstream: Upstream | None, narrow: bool
    ) -> Facts:
        """Return the facts of all rows. With class weights, ranks exchange the weights of the targets."""
        if options.weight is None or self._given:
            return gather_facts(options, vocabulary, dtype, shift, upstream, narrow)
        weight = options.weight.to(accumulation_dtype(dtype))

        def weigh(target: Tensor) -> Tensor:
            if self._saved is not None:
                return self._saved.kept[self._kept_names.index("row_weight")]
            self._weights = self._exchanged(weight, target)
            return self._weights.of_rows

        facts = gather_facts(options, vocabulary, dtype, shift, upstream, narrow, weigh)
        return replace(facts, class_weight_total=None)  # the sum over this shard only, which is not used here

    def _exchanged(self, weight: Tensor, target: Tensor) -> Weights:
        """Return the weights of the targets, and the sums of all class weights, from all ranks."""
        layout, count = self.layout, len(target)
        sent = torch.zeros(count + len(layout.ranges), dtype=weight.dtype, device=weight.device)
        if layout.count:
            local = target - layout.first
            owned = (local >= 0) & (local < layout.count)
            sent[:count] = torch.where(owned, weight[local.clamp(0, layout.count - 1)], 0)
            sent[count + layout.rank] = weight.sum()
        found = add_up(sent, layout.group).land()
        of_rows, of_ranks = found[:count], found[count:]
        total = sum(of_ranks.unbind(), start=sent.new_zeros(()))
        return Weights(of_rows, of_ranks, total.expand(count))

    def take(self, linear: Linear, part: Part) -> Taken:
        """Return the hidden states of a part, and this shard's target logits if the compute dtype rounds logits."""
        return self._steps().take(linear, part)

    def fold(self, part: Part, blocks: Iterable[tuple[int, Tensor]], target_logits: Tensor | None) -> Flight:
        """Fold a part's logits, and start to gather the sums. `blocks` contains (first row, logits (R, C)) pairs."""
        like = self._facts.weight
        rows = part.stop - part.start
        packed = torch.empty(len(self._names), rows, dtype=like.dtype, device=like.device)
        for start, logits in blocks if self.layout.count else [(part.start, like.new_empty(rows, 0))]:
            here = slice(start - part.start, start - part.start + len(logits))
            exact = None if target_logits is None else target_logits[here]
            self._steps().fold(logits, start, Slots(self._names, packed[:, here]), exact)
        return gather(packed, self.layout.group)

    def land(self, flight: Flight, part: Part, wanted: bool) -> Coefficients | None:
        """Wait for the sums of all ranks and record the results of a part. Return its coefficients if wanted."""
        if self._results is None:
            self._results = new_results(self._ordered)
            if self._given and "accuracy" in self.spec.stats:
                self._truth = self._results.loss.new_zeros(len(self._ordered.weight), dtype=torch.int64)
        landing = Landing(part, self._results, self.kept, self._truth, self._weights, wanted)
        return self._steps().land(Slots(self._names, flight.land()), landing)

    def again(self, part: Part) -> Coefficients:
        """Return the coefficients of a part from saved data, without communication."""
        assert self._saved is not None
        return self._steps().again(self._saved.kept, part)

    def write(self, made: Coefficients, part: Part, blocks: Iterable[tuple[int, Tensor, Tensor | None]]) -> None:
        """Write the gradient of a part's logits. `blocks` contains (first row, logits, gradient) triples."""
        for start, logits, grad in blocks if self.layout.count else ():
            assert grad is not None
            here = slice(start - part.start, start - part.start + len(logits))
            some = made if len(logits) == part.stop - part.start else made.of(here)
            self._steps().gradient(logits, start, some, grad)

    def finish(self) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the statistics."""
        if self._truth is not None:
            truth = self._truth
            if self._order is not None:
                order = self._order[: self._number]
                truth = truth.new_zeros(self.count).index_copy_(0, order, truth[: self._number])
            self._facts = replace(self._facts, target=truth)
        return super().finish()

    def _local(self, facts: Facts, rows: slice) -> Tensor | None:
        return None if facts.target is None else facts.target[rows] - self.layout.first

    def _steps(self) -> Steps:
        """Return the backend's steps for the rows in their current order."""
        facts = self._ordered
        if self._steps_of is None or self._steps_of[0] is not facts:
            shard = Shard(facts, self.layout, self._local(facts, slice(None)))
            self._steps_of = facts, STEPS[self._kernel](shard)
        return self._steps_of[1]


def _without_padding(options: Options, layout: Layout) -> Options:
    """Return the options with class weights and probabilities cut to the shard's classes without padding."""
    if layout.count == layout.rows:
        return options
    if options.weight is not None:
        options = options._replace(weight=options.weight[: layout.count])
    if options.target.is_floating_point():
        options = options._replace(target=options.target[..., : layout.count])
    return options
