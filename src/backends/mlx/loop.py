"""The one loop of a call over parts of rows: logits of a part, its results, its gradient, and the sums of gradients.

Losses, log-probabilities, supports and divergences take it once in a forward pass and, for gradients that were not made
there, once more. A step computes the results and gradients of a part; see `xent.backends.mlx.steps`.
"""

from collections.abc import Callable

import mlx.core as mx

from xent.backends.mlx.sources import Loaded, Source, Sums

__all__ = ["Step", "run"]

Step = Callable[[Loaded, slice], tuple[list[mx.array], mx.array | None]]
"""Maps the logits of a part to (results, which the step keeps; gradient of the logits, or None)."""


def run(source: Source, step: Step, sums: Sums, dead: mx.array, after: list[mx.array]) -> dict[str, mx.array]:
    """Compute all parts, each after the one before and the first after `after`. Return the gradients by name.

    `dead` rows (N,) have no gradient.
    """
    tie = after
    for part in source.parts:
        loaded = source.load(part, tie)
        tie, grad = step(loaded, part)
        if grad is not None:
            tie = tie + sums.add(grad, loaded.rows, dead[part])
        del loaded, grad
    return sums.result()
