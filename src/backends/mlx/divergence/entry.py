"""Divergences of MLX arrays, with MLX's own operations on every device, in chunks of rows.

Gradients are attached with `autograd.with_gradients`, as for the losses. Those that are expected for a mean or sum are
computed with it, others when they are needed.
"""

from collections.abc import Collection

import mlx.core as mx
import numpy as np

from xent.backends.mlx import empty
from xent.backends.mlx.autograd import guarded, scaled, with_gradients
from xent.backends.mlx.classifier import Classifier, check_dtypes
from xent.backends.mlx.devices import chunk_device
from xent.backends.mlx.divergence.facts import DivergenceFacts, gather_facts, known_classes
from xent.backends.mlx.divergence.rows import KnownClasses, entropy, from_top_k, full
from xent.backends.mlx.facts import accumulation_dtype
from xent.backends.mlx.gradients import GradientSums
from xent.backends.mlx.tracing import is_differentiated
from xent.core.chunks import rows_per_chunk
from xent.core.spec import LossSpec, Stats
from xent.core.teachers import DivergenceCall, LinearLogits, StoredLogits, TopKTeacher

__all__ = ["run"]

_WORKSPACE = {"mlx-cpu": 64 * 2**20, "metal": 512 * 2**20, "mlx-cuda": 1280 * 2**20}
_FEWEST_ROWS = 64
_PASSES = 4  # arrays of a chunk's size that exist beside its logits


def run(call: DivergenceCall) -> tuple[mx.array, Stats]:
    """Run a call; return loss and statistics in the caller's shapes."""
    given = _differentiable(call)
    if 0 in call.rows:
        return empty.run(list(given.values()), LossSpec(reduction=call.reduction, stats=call.stats), call.rows)
    rows = _Rows(guarded(call))
    reduces = call.reduction != "none"
    expected = [name for name, array in given.items() if is_differentiated(array)] if reduces else []
    losses, kept = rows.computed(rows.facts, expected)

    def gradients(upstream: dict[str, mx.array | None]) -> list[mx.array]:
        made = dict(kept)
        kept.clear()
        facts = rows.facts if reduces else rows.facts.of_rows(upstream["loss"])
        first = expected if reduces else [name for name, array in given.items() if is_differentiated(array)]
        # Gradients that were not expected are computed separately, so that MLX evaluates them only if needed.
        for names in (first, *([name] for name in given if name not in first)):
            if names and not made.keys() >= set(names):
                made |= rows.computed(facts, names)[1]
        factor = facts.factor(upstream["loss"]) if reduces else None
        return [scaled(made.pop(name), factor, array.dtype) for name, array in given.items()]

    loss = losses.reshape(call.rows) if not reduces else losses.sum()
    if rows.facts.divisor is not None:
        loss = mx.where(rows.facts.divisor == 0, 0, loss / rows.facts.divisor)
    entropies = None if rows.entropies is None else rows.entropies.reshape(call.rows)
    return with_gradients({"loss": loss}, list(given.values()), gradients)["loss"], Stats(entropy=entropies)


def _differentiable(call: DivergenceCall) -> dict[str, mx.array]:
    """Return the arrays that may have a gradient: "logits" with classes last; or "input", a dense "weight", "bias"."""
    student, teacher = call.student, call.teacher
    if isinstance(teacher, LinearLogits):
        check_dtypes(teacher.input, teacher.weight, teacher.bias, "teacher.")
    if isinstance(student, StoredLogits):
        return {"logits": mx.moveaxis(student.logits, call.axis, -1)}
    check_dtypes(student.input, student.weight, student.bias)
    given = {"input": student.input, "weight": student.weight, "bias": student.bias}
    return {name: array for name, array in given.items() if isinstance(array, mx.array)}


class _Rows:
    """The rows of a call, without autograd, computed a chunk at a time."""

    def __init__(self, call: DivergenceCall) -> None:
        self._call, self._count = call, int(np.prod(call.rows))
        self._acc = accumulation_dtype(call.array.dtype)
        self._known = known_classes(call)
        self.facts = gather_facts(call, self._known)
        self._student = _Side(call.student, call)
        self._teacher = None if isinstance(call.teacher, TopKTeacher) else _Side(call.teacher, call)
        device = chunk_device()
        size = call.vocabulary * self._acc.size * (2 if self._known is None else 1)
        if call.workspace is None:
            size *= _PASSES
        workspace = call.workspace or max(_WORKSPACE[device], _FEWEST_ROWS * size)
        step = rows_per_chunk(self._count, size, 1, workspace, device)
        self.entropies: mx.array | None = None
        """(N,), if requested, after the rows were computed."""
        self._parts = [slice(start, min(start + step, self._count)) for start in range(0, self._count, step)]

    def computed(self, facts: DivergenceFacts, needs: Collection[str]) -> tuple[mx.array, dict[str, mx.array]]:
        """Return the weighted losses (N,), and the gradients that `needs` names."""
        losses, grads, tie = list[mx.array](), list[mx.array](), list[mx.array]()
        entropies: list[mx.array] | None = [] if self._call.stats and self.entropies is None else None
        sums = None
        if needs and isinstance(self._call.student, LinearLogits):
            assert self._student.classifier is not None
            sums = GradientSums(needs, self._student.classifier, self._call.student.input, len(self._parts))
        for part in self._parts:
            dead, idle = facts.dead[part], facts.idle[part]
            hidden, z = self._student.block(part, idle, tie)
            x, slope = _activated(z.astype(self._acc), self._student.softcap, self._student.scale)
            found, derivative = self._divergence(x, part, dead, tie)
            losses.append(mx.where(dead, 0, found * facts.weight[part]))
            tie = [losses[-1]]
            if entropies is not None:
                entropies.append(mx.where(idle, 0, entropy(x)))
                tie.append(entropies[-1])
            if not needs:
                continue
            factor = (facts.scale[part] * self._student.scale)[:, None]
            grad = mx.where(dead[:, None], 0, derivative * (factor if slope is None else factor * slope))
            if sums is None:
                # A gradient is rounded to float16 only after the upstream gradient is multiplied in.
                narrow = self._call.array.dtype == mx.float16
                grads.append(grad if narrow else grad.astype(self._call.array.dtype))
                tie.append(grads[-1])
            else:
                tie += sums.add(grad.astype(self._call.array.dtype), hidden, dead)
        if entropies is not None:
            self.entropies = mx.concatenate(entropies)
        if sums is not None:
            return mx.concatenate(losses), sums.result()
        shape = (*self._call.rows, self._call.vocabulary)
        return mx.concatenate(losses), {"logits": mx.concatenate(grads).reshape(shape)} if grads else {}

    def _divergence(self, x: mx.array, part: slice, dead: mx.array, tie: list[mx.array]) -> tuple[mx.array, mx.array]:
        if self._known is not None:
            # Padding entries get the id V, which is not a class.
            ids, vocabulary = self._known.ids[part], self._call.vocabulary
            ids = mx.where((ids < 0) | dead[:, None], vocabulary, ids)
            known = KnownClasses(ids, self._known.log_q[part], self._known.tail, self._known.tolerance)
            return from_top_k(x, known)
        assert self._teacher is not None
        _, z = self._teacher.block(part, dead, tie)
        return full(self._call.beta, x, _activated(z.astype(self._acc), self._teacher.softcap, self._teacher.scale)[0])


class _Side:
    """The raw logits of one side: stored, or computed from hidden states and a classifier."""

    def __init__(self, source: StoredLogits | LinearLogits, call: DivergenceCall) -> None:
        self.softcap, self.scale = source.softcap, source.logit_scale
        count = int(np.prod(call.rows))
        self.classifier: Classifier | None = None
        if isinstance(source, StoredLogits):
            self._rows = mx.moveaxis(source.logits, call.axis, -1).reshape(count, call.vocabulary)
        else:
            self._rows = source.input.reshape(count, source.input.shape[-1])
            self.classifier = Classifier(source.weight, source.bias, call.vocabulary, True)

    def block(self, part: slice, idle: mx.array, tie: list[mx.array]) -> tuple[mx.array, mx.array]:
        """Return hidden states or logits of a part, 0 in `idle` rows, and logits (R, V), computed after `tie`."""
        rows = mx.depends(self._rows[part], tie) if tie else self._rows[part]
        rows = mx.where(idle[:, None], 0, rows)
        return rows, rows if self.classifier is None else self.classifier.logits(rows)


def _activated(z: mx.array, softcap: float | None, scale: float) -> tuple[mx.array, mx.array | None]:
    """Return x, and with a softcap its slope; computed as 1 - tanh^2 the slope would cancel."""
    x = z if scale == 1 else z * scale
    if softcap is None:
        return x, None
    inside = x / softcap
    return softcap * mx.tanh(inside), 1 / mx.square(mx.cosh(inside))
