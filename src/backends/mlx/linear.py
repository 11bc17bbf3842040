"""The loop of linear calls over chunks in MLX: compute logits, replace them by their gradient, multiply it back.

MLX chooses the order of evaluation. To keep only one chunk of logits in memory, the hidden states of each chunk are
made to depend (`mx.depends`) on all results of the chunk before.
"""

from collections.abc import Collection
from dataclasses import replace

import mlx.core as mx

from xent.backends.mlx import target_gradient
from xent.backends.mlx.classifier import Classifier
from xent.backends.mlx.devices import chunk_device
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.gradients import GradientSums
from xent.backends.mlx.kernels import Asked, Found, Kernels, RowFacts, joined
from xent.backends.mlx.support import Entries
from xent.core.chunks import rows_per_chunk
from xent.core.spec import LinearCall, QuantizedWeight

__all__ = ["Chunks", "differentiable"]


def differentiable(call: LinearCall) -> dict[str, mx.array]:
    """Return the arrays that may have a gradient: "input", "weight" unless it is quantized, and "bias" if given."""
    frozen = isinstance(call.linear_weight, QuantizedWeight)
    inputs = {"input": call.input, "weight": None if frozen else call.linear_weight, "bias": call.linear_bias}
    return {name: array for name, array in inputs.items() if array is not None}


class Chunks:
    """The rows of a call, a chunk at a time.

    The arrays of `call` are not differentiated by MLX; `trained` says whether the classifier is expected to need a
    gradient.
    """

    def __init__(self, call: LinearCall, facts: Facts, kernels: Kernels, trained: bool) -> None:
        self._facts, self._kernels = facts, kernels
        self._input = call.input
        self._hidden = self._input.reshape(facts.count, self._input.shape[-1])
        self._exact, vocabulary = facts.spec.float32_logits, facts.vocabulary
        itemsize = max(self._input.dtype.size, 4 * self._exact)
        self._classifier = Classifier(call.linear_weight, call.linear_bias, vocabulary, self._exact)
        # The bits of an exact call must not depend on which gradients are needed.
        few = trained and not self._exact
        step = rows_per_chunk(facts.count, vocabulary, itemsize, call.workspace, chunk_device(), few)
        self._parts = [(start, min(start + step, facts.count)) for start in range(0, facts.count, step)]

    def forward(self, needs: Collection[str]) -> tuple[Found, dict[str, mx.array]]:
        """Return the results of all rows, and the gradients that `needs` names."""
        asked = Asked.of(self._facts.spec.stats, grad=bool(needs))
        sums, every, tie = self._sums(needs), list[Found](), list[mx.array]()
        for start, stop in self._parts:
            hidden, logits, rows = self._chunk(self._facts, start, stop, tie)
            found = self._kernels.forward(logits, rows, asked)
            made = [] if found.grad is None else self._add(sums, found.grad, hidden, rows)
            every.append(replace(found, grad=None))
            tie = every[-1].arrays() + made
        return joined(every), sums.result()

    def backward(self, facts: Facts, found: Found, needs: Collection[str]) -> dict[str, mx.array]:
        """Return the gradients that `needs` names; compute the logits again."""
        assert found.norm is not None
        sums, tie = self._sums(needs), [found.norm]
        for start, stop in self._parts:
            hidden, logits, rows = self._chunk(facts, start, stop, tie)
            grad = self._kernels.backward(logits, rows, found.norm[start:stop])
            tie = self._add(sums, grad, hidden, rows)
        return sums.result()

    def of_target(self, facts: Facts, found: Found) -> mx.array:
        """Return the gradient (N, V) of class probabilities; compute the logits again."""
        assert found.norm is not None
        made, tie = list[mx.array](), [found.norm]
        for start, stop in self._parts:
            _, logits, rows = self._chunk(facts, start, stop, tie)
            tie = target_gradient.of_block(logits, rows, found.norm[start:stop])
            made += tie
        return target_gradient.placed(made, facts)

    def pick(self, entries: Entries) -> mx.array:
        """Return the entries' logits: see `xent.backends.mlx.supported.Source`."""
        picks, tie = mx.zeros(entries.ids.shape, self._facts.rows.weight.dtype), list[mx.array]()
        for start, stop in self._parts:
            _, logits, _ = self._chunk(self._facts, start, stop, tie)
            inside, row = entries.within(start, stop)
            picks = mx.where(inside, logits[row, entries.ids].astype(picks.dtype), picks)
            tie = [picks]
        return picks

    def spread(self, values: mx.array, facts: Facts, needs: Collection[str]) -> dict[str, mx.array]:
        """Return the gradients from that of the picks: see `xent.backends.mlx.supported.Source`."""
        sums, tie = self._sums(needs), [values]
        for start, stop in self._parts:
            hidden, _, rows = self._chunk(facts, start, stop, tie)
            tied = mx.depends(values.astype(hidden.dtype), tie)
            tie = sums.add(facts.scattered(tied, start, stop), hidden, rows.dead)
        return sums.result()

    def _add(self, sums: GradientSums, grad: mx.array, hidden: mx.array, rows: RowFacts) -> list[mx.array]:
        return sums.add(grad.astype(hidden.dtype), hidden, rows.dead)

    def _sums(self, needs: Collection[str]) -> GradientSums:
        return GradientSums(needs, self._classifier, self._input, len(self._parts))

    def _chunk(self, facts: Facts, start: int, stop: int, tie: list[mx.array]) -> tuple[mx.array, mx.array, RowFacts]:
        """Return hidden states (R, D), logits (R, V) and facts of rows [start, stop), computed after `tie`."""
        hidden = self._hidden[start:stop]
        if tie:
            hidden = mx.depends(hidden, tie)
        # Every row with a target has statistics, even with weight 0.
        counted = bool(facts.spec.stats)
        idle = (facts.ignored if counted else facts.rows.dead)[start:stop]
        hidden = mx.where(idle[:, None], 0, hidden)
        target, target_logits = facts.rows.target, None
        if target is not None and hidden.dtype.size < 4 and not self._exact:
            # The rounding of the target's logit would be most of the error of the loss.
            target_logits = self._classifier.target_logits(hidden, target[start:stop])
        # The logits of a dead row equal the bias, which may be -inf.
        finite = not counted and self._classifier.bias is None and facts.rows.bend is None
        rows = replace(facts.block(start, stop, target_logits), finite=finite)
        return hidden, self._classifier.logits(hidden), rows
