"""Where the logits of a call come from, in parts of rows, and where their gradient goes.

MLX chooses the order of evaluation. To keep only one part in memory, the rows of each part are made to depend
(`mx.depends`) on all results of the part before.
"""

from collections.abc import Collection
from typing import NamedTuple, Protocol

import mlx.core as mx

from xent.backends.mlx.classifier import Classifier
from xent.backends.mlx.devices import chunk_device
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.gradients import GradientSums
from xent.core.call import Allowed, Call, Classes, Dense, Given, Product, TopK, vocabulary_of
from xent.core.chunks import rows_per_chunk
from xent.core.spec import DIFFERENTIABLE

__all__ = ["Collected", "Computed", "Loaded", "Source", "Stored", "Sums", "source_of"]

_WORKSPACE = {"mlx-cpu": 64 * 2**20, "metal": 512 * 2**20, "mlx-cuda": 1280 * 2**20}
_FEWEST_ROWS = 64
_PASSES = 4  # arrays of a part's size that a divergence needs beside its logits


class Loaded(NamedTuple):
    """The logits of R rows."""

    rows: mx.array
    """(R, D) hidden states, or the logits."""
    logits: mx.array
    """(R, V)"""
    target_logits: mx.array | None = None
    """(R,) the targets' logits in float32, if the others are rounded to 16 bits."""


class Sums(Protocol):
    """Gradients that are accumulated over parts."""

    def add(self, grad_logits: mx.array, hidden: mx.array, dead: mx.array) -> list[mx.array]:
        """Add a part: gradient of logits (R, V), `Loaded.rows`, dead rows (R,). Return the computed arrays."""

    def result(self) -> dict[str, mx.array]:
        """Return the gradients by name, before they are multiplied by the upstream gradient."""


class Collected:
    """The gradient of given logits, or of class probabilities: the gradients of all parts, joined."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self._name, self._shape, self._parts = name, shape, list[mx.array]()

    def add(self, grad_logits: mx.array, hidden: mx.array, dead: mx.array) -> list[mx.array]:
        """See `Sums`."""
        self._parts.append(grad_logits)
        return [grad_logits]

    def result(self) -> dict[str, mx.array]:
        """See `Sums`; may be called once, so that MLX can reuse the memory of the parts."""
        parts, self._parts = self._parts, []
        if not parts:
            return {}
        joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return {self._name: joined.reshape(self._shape)}


class Source(Protocol):
    """The logits of N rows."""

    parts: list[slice]

    def load(self, part: slice, tie: list[mx.array]) -> Loaded:
        """Return the logits of some rows, computed after `tie`. Rows of which nothing is computed may be 0."""

    def sums(self, needs: Collection[str]) -> Sums:
        """Return the sums for the gradients that `needs` names."""


class Stored:
    """Given logits. `idle` rows (N,) are read as 0; None if all are read as they are."""

    def __init__(self, given: Given, parts: list[slice], idle: mx.array | None) -> None:
        self._shape, self._idle, self.parts = given.logits.shape, idle, parts
        self._rows = given.logits.reshape(-1, self._shape[-1])

    def load(self, part: slice, tie: list[mx.array]) -> Loaded:
        """See `Source`."""
        rows = _part(self._rows, part, tie)
        rows = rows if self._idle is None else mx.where(self._idle[part, None], 0, rows)
        return Loaded(rows, rows)

    def sums(self, needs: Collection[str]) -> Sums:
        """See `Source`."""
        return Collected("logits", self._shape)


class Computed:
    """Logits that are computed from hidden states and a classifier. `target` has the classes of the rows or is None."""

    def __init__(
        self, product: Product, parts: list[slice], idle: mx.array, exact: bool, target: mx.array | None
    ) -> None:
        self._input, self._idle, self._exact, self.parts = product.input, idle, exact, parts
        self._hidden = product.input.reshape(-1, product.input.shape[-1])
        self._classifier = Classifier(product.weight, product.bias, vocabulary_of(product), exact)
        # The rounding of the target's logit would be most of the error of the loss.
        self._target = None if exact or product.input.dtype.size >= 4 else target

    def load(self, part: slice, tie: list[mx.array]) -> Loaded:
        """See `Source`."""
        hidden = mx.where(self._idle[part, None], 0, _part(self._hidden, part, tie))
        found = None if self._target is None else self._classifier.target_logits(hidden, self._target[part])
        return Loaded(hidden, self._classifier.logits(hidden), found)

    def sums(self, needs: Collection[str]) -> Sums:
        """See `Source`."""
        return GradientSums(needs, self._classifier, self._input, len(self.parts))


def _part(rows: mx.array, part: slice, tie: list[mx.array]) -> mx.array:
    """Return some rows, computed after `tie`. All rows are the array itself, whose memory MLX can reuse then."""
    some = rows if part.stop - part.start == len(rows) else rows[part]
    return mx.depends(some, tie) if tie else some


def source_of(call: Call, facts: Facts, trained: bool) -> tuple[Source, Source | None]:
    """Return the source of a prepared call's logits, and that of its teacher's if these are dense.

    `trained` says whether the classifier is expected to need a gradient.
    """
    source, target, idle = call.source, call.target, facts.idle
    diverges = isinstance(target, (Dense, TopK))
    options = call.options
    exact = diverges or options.exact or not set(DIFFERENTIABLE).isdisjoint(options.stats)
    parts = _parts(call, facts, exact, trained)
    made: Source
    if isinstance(source, Given):
        made = Stored(source, parts, idle if diverges else None)
    else:
        of_classes = facts.rows.target if isinstance(target, (Classes, Allowed)) else None
        made = Computed(source, parts, idle, exact, of_classes)
    if not isinstance(target, Dense):
        return made, None
    teacher = target.source
    if isinstance(teacher, Given):
        return made, Stored(teacher, parts, idle)
    return made, Computed(teacher, parts, idle, True, None)


def _parts(call: Call, facts: Facts, exact: bool, trained: bool) -> list[slice]:
    """Return the rows of each part."""
    source, target, count, vocabulary = call.source, call.target, facts.count, facts.vocabulary
    device = chunk_device()
    workspace = None if isinstance(source, Given) else source.workspace
    if isinstance(target, (Dense, TopK)):
        size = vocabulary * facts.rows.weight.dtype.size * (2 if isinstance(target, Dense) else 1)
        size *= 1 if workspace else _PASSES
        step = rows_per_chunk(count, size, 1, workspace or max(_WORKSPACE[device], _FEWEST_ROWS * size), device)
    elif isinstance(source, Given):
        step = count
    else:
        itemsize = max(source.input.dtype.size, 4 * exact)
        # The bits of an exact call must not depend on which gradients are needed.
        step = rows_per_chunk(count, vocabulary, itemsize, workspace, device, trained and not exact)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
