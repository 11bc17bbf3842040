"""Scatter the gradient of a support's entries to a gradient of whole rows of logits."""

import mlx.core as mx

from xent.backends.mlx.facts import Facts
from xent.backends.mlx.support import Entries

__all__ = ["scattered"]


def scattered(values: mx.array, entries: Entries, facts: Facts, start: int, stop: int) -> mx.array:
    """Return rows [start, stop) of a gradient (R, V): `values` (M,) at the entries, else 0; NaN in invalid rows."""
    inside, row = entries.within(start, stop)
    assert facts.invalid is not None
    nothing = mx.where(facts.invalid[start:stop, None], mx.nan, 0).astype(values.dtype)
    grad = mx.broadcast_to(nothing, (stop - start, facts.vocabulary))
    return grad.at[row, entries.ids].add(mx.where(inside, values, 0))
