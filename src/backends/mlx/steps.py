"""The steps of a call's rows: from the logits of a part to its results and the gradient of its logits.

`Losses` has the row kernel of a device, `Divergences` MLX's own operations, and `xent.backends.mlx.supported.Supported`
the sums over supports.
"""

from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from xent.backends.mlx import target_gradient
from xent.backends.mlx.divergence_rows import entropy, from_top_k, full
from xent.backends.mlx.elementwise import activate
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.kernels import Asked, Found, Kernels, RowFacts, joined
from xent.backends.mlx.loop import Step
from xent.backends.mlx.sources import Loaded, Source
from xent.core.call import Activation, Dense, Given, array_of

__all__ = ["Divergences", "Losses", "Steps"]


class Steps(Protocol):
    """The steps of all rows of a call."""

    def forward(self, wanted: bool) -> Step:
        """Return the step of a forward pass, with the gradient of the logits if it is wanted."""

    def found(self) -> Found:
        """Return the results of all rows, after the forward pass."""

    def backward(self, facts: Facts) -> tuple[Step, list[mx.array]]:
        """Return the step of a later pass for gradients, and the results of the forward pass that it needs.

        `facts` include the upstream gradients of the rows.
        """


class Losses:
    """The steps of losses and log-probabilities over all classes."""

    def __init__(self, facts: Facts, kernels: Kernels) -> None:
        self._facts, self._kernels, self._parts = facts, kernels, list[Found]()
        source = facts.call.source
        self._stored = isinstance(source, Given)
        # The logits of a dead row equal the bias, which may be -inf.
        stats, bent = facts.call.options.stats, facts.rows.bend is not None
        self._finite = not (isinstance(source, Given) or stats or bent) and source.bias is None

    def forward(self, wanted: bool) -> Step:
        """See `Steps`."""
        asked = Asked.of(self._facts.call.options.stats, grad=wanted)

        def step(loaded: Loaded, part: slice) -> tuple[list[mx.array], mx.array | None]:
            found = self._kernels.forward(loaded.logits, self._rows(self._facts, loaded, part), asked)
            # Keep no other reference to the gradient, so that MLX can reuse its memory.
            self._parts.append(replace(found, grad=None))
            return self._parts[-1].arrays(), found.grad

        return step

    def found(self) -> Found:
        """See `Steps`."""
        self._parts = [joined(self._parts)]
        return self._parts[0]

    def backward(self, facts: Facts) -> tuple[Step, list[mx.array]]:
        """See `Steps`."""
        norm = self._norm()

        def step(loaded: Loaded, part: slice) -> tuple[list[mx.array], mx.array | None]:
            return [], self._kernels.backward(loaded.logits, self._rows(facts, loaded, part), norm[part])

        return step, [norm]

    def of_target(self, facts: Facts) -> tuple[Step, list[mx.array]]:
        """Return the step for the gradient of class probabilities, as `backward` does."""
        norm = self._norm()

        def step(loaded: Loaded, part: slice) -> tuple[list[mx.array], mx.array | None]:
            rows = self._rows(facts, loaded, part)
            return [], target_gradient.of_block(loaded.logits, rows, norm[part])

        return step, [norm]

    def _norm(self) -> mx.array:
        norm = self._parts[0].norm
        assert norm is not None
        return norm

    def _rows(self, facts: Facts, loaded: Loaded, part: slice) -> RowFacts:
        alone = self._stored and part.stop - part.start == facts.count
        return replace(facts.block(part), target_logits=loaded.target_logits, finite=self._finite, alone=alone)


class Divergences:
    """The steps of divergences. `teacher` has the logits of a dense teacher."""

    def __init__(self, facts: Facts, teacher: Source | None) -> None:
        self._facts, self._teacher, self._parts = facts, teacher, list[Found]()
        target = facts.call.target
        self._activation = target.activation if isinstance(target, Dense) else Activation()

    def forward(self, wanted: bool) -> Step:
        """See `Steps`."""
        facts = self._facts

        def step(loaded: Loaded, part: slice) -> tuple[list[mx.array], mx.array | None]:
            rows = facts.block(part)
            x, slope = rows.activate(loaded.logits)
            loss, derivative = self._divergence(facts, loaded, part, x)
            of_student = mx.where(facts.idle[part], 0, entropy(x)) if facts.call.options.stats else None
            found = Found(mx.where(rows.dead, 0, loss * rows.weight), entropy=of_student)
            self._parts.append(found)
            return found.arrays(), self._gradient(rows, derivative, slope) if wanted else None

        return step

    def found(self) -> Found:
        """See `Steps`."""
        return joined(self._parts)

    def backward(self, facts: Facts) -> tuple[Step, list[mx.array]]:
        """See `Steps`."""

        def step(loaded: Loaded, part: slice) -> tuple[list[mx.array], mx.array | None]:
            rows = facts.block(part)
            x, slope = rows.activate(loaded.logits)
            return [], self._gradient(rows, self._divergence(facts, loaded, part, x)[1], slope)

        return step, []

    def _gradient(self, rows: RowFacts, derivative: mx.array, slope: mx.array | None) -> mx.array:
        factor = rows.scale * rows.number("logit_scale")
        made = derivative * (factor[:, None] if slope is None else factor[:, None] * slope)
        made = mx.where(rows.dead[:, None], 0, made)
        dtype = array_of(self._facts.call).dtype
        # A gradient is rounded to float16 only after the upstream gradient is multiplied in.
        return made if dtype == mx.float16 and isinstance(self._facts.call.source, Given) else made.astype(dtype)

    def _divergence(self, facts: Facts, loaded: Loaded, part: slice, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return the divergence (R,) and its derivative (R, V) with respect to x."""
        if facts.known is not None:
            return from_top_k(
                facts.call.options.kind, x, facts.known.part(part, facts.rows.dead[part], facts.vocabulary)
            )
        assert self._teacher is not None
        z = self._teacher.load(part, [loaded.rows]).logits.astype(x.dtype)
        scale, cap = self._activation[:2]
        scale = None if isinstance(scale, (int, float)) and scale == 1 else scale
        return full(facts.call.options, x, activate(z, scale, cap)[0])
