"""`linear_cross_entropy` in MLX: make a chunk's logits, turn them into their gradient, multiply it back.

MLX evaluates what is needed in an order of its own. So that one chunk's logits are alive at a time, the hidden states
of each chunk are tied to all that the chunk before was made into.
"""

from collections.abc import Collection
from dataclasses import replace

import mlx.core as mx

from xent.backends.mlx.autograd import scaled, with_gradients
from xent.backends.mlx.classifier import classifier_of
from xent.backends.mlx.devices import chunk_device
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.gradients import Gradients
from xent.backends.mlx.kernels import Found, Kernels, RowFacts, joined
from xent.backends.mlx.results import asked_for, reduced
from xent.backends.mlx.tracing import is_differentiated
from xent.core.chunks import rows_per_chunk
from xent.core.spec import LinearCall, QuantizedWeight

__all__ = ["differentiable", "run"]


def run(call: LinearCall, facts: Facts, kernels: Kernels) -> tuple[mx.array, Found]:
    """Return the loss, flat with reduction "none", and what was found out about the rows.

    The gradients of a mean or sum that may be asked for are made with the loss. Others, and those of reduction "none",
    are made from logits that are computed again.
    """
    given = differentiable(call)
    expected = [name for name, array in given.items() if is_differentiated(array)]
    reduces = facts.spec.reduction != "none"
    chunks = _Chunks(call, facts, kernels, sums="weight" in expected)
    found, kept = chunks.forward(expected if reduces else [])

    def gradients(upstream: mx.array | None) -> list[mx.array]:
        made, now = dict(kept), facts
        kept.clear()
        if not reduces:
            now, upstream = facts.with_upstream(upstream), None
        # What was not expected is made apart: if nobody needs it after all, it is never evaluated.
        for names in (expected, *([name] for name in given if name not in expected)):
            if not made.keys() >= set(names):
                made |= chunks.backward(now, found, names)
        factor = facts.factor(upstream)
        return [scaled(made.pop(name), factor, array.dtype) for name, array in given.items()]

    return with_gradients(reduced(found.loss, facts), list(given.values()), gradients), found


def differentiable(call: LinearCall) -> dict[str, mx.array]:
    """Return what may have a gradient: "input", "weight" unless it is quantized, and "bias" if there is one."""
    frozen = isinstance(call.linear_weight, QuantizedWeight)
    inputs = {"input": call.input, "weight": None if frozen else call.linear_weight, "bias": call.linear_bias}
    return {name: array for name, array in inputs.items() if array is not None}


class _Chunks:
    """The rows of a call, a chunk at a time."""

    def __init__(self, call: LinearCall, facts: Facts, kernels: Kernels, sums: bool) -> None:
        self._facts, self._kernels = facts, kernels
        self._input = mx.stop_gradient(call.input)
        self._hidden = self._input.reshape(facts.count, self._input.shape[-1])
        self._classifier = classifier_of(call)
        itemsize, vocabulary = self._input.dtype.size, facts.vocabulary
        step = rows_per_chunk(facts.count, vocabulary, itemsize, call.workspace, chunk_device(), sums)
        self._parts = [(start, min(start + step, facts.count)) for start in range(0, facts.count, step)]

    def forward(self, needs: Collection[str]) -> tuple[Found, dict[str, mx.array]]:
        """Return what is found out about all rows, and the gradients that `needs` names."""
        asked = asked_for(self._facts.spec, grad=bool(needs), norm=True)
        sums, every, tie = self._sums(needs), list[Found](), list[mx.array]()
        for start, stop in self._parts:
            hidden, logits, rows = self._chunk(self._facts, start, stop, tie)
            found = self._kernels.forward(logits, rows, asked)
            made = [] if found.grad is None else sums.add(found.grad, hidden, rows.dead)
            every.append(replace(found, grad=None))
            tie = every[-1].arrays() + made
        return joined(every), sums.result()

    def backward(self, facts: Facts, found: Found, needs: Collection[str]) -> dict[str, mx.array]:
        """Return the gradients that `needs` names, from logits made again."""
        assert found.norm is not None
        sums, tie = self._sums(needs), [found.norm]
        for start, stop in self._parts:
            hidden, logits, rows = self._chunk(facts, start, stop, tie)
            tie = sums.add(self._kernels.backward(logits, rows, found.norm[start:stop]), hidden, rows.dead)
        return sums.result()

    def _sums(self, needs: Collection[str]) -> Gradients:
        return Gradients(needs, self._classifier, self._input, len(self._parts))

    def _chunk(self, facts: Facts, start: int, stop: int, tie: list[mx.array]) -> tuple[mx.array, mx.array, RowFacts]:
        """Return hidden states (R, D), logits (R, V) and facts of rows [start, stop), made once `tie` is."""
        hidden = self._hidden[start:stop]
        if tie:
            hidden = mx.depends(hidden, tie)
        # Statistics are due for every row with a target, even one of weight 0.
        counted = bool(facts.spec.stats)
        idle = (facts.ignored if counted else facts.rows.dead)[start:stop]
        hidden = mx.where(idle[:, None], 0, hidden)
        target, target_logits = facts.rows.target, None
        if target is not None and hidden.dtype.size < 4:
            # Most of the loss's error would be the rounding of this one logit.
            target_logits = self._classifier.target_logits(hidden, target[start:stop])
        # The logits of a dead row are the bias, which may hold -inf.
        finite = not counted and self._classifier.bias is None
        rows = replace(facts.block(start, stop, target_logits), finite=finite)
        return hidden, self._classifier.logits(hidden), rows
