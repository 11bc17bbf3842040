"""Several heads with one classifier in the reference, computed as one call per head.

Head j predicts target t + shift[j] from row t of its own hidden states. The loss is sum_j h_j R_j, where h_j is the
head's weight and R_j its reduced loss.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from xent.core.call import Call, Given, Options
from xent.core.spec import ROW_STATS, Stats

__all__ = ["apart", "combined", "factors"]


def apart(call: Call) -> list[Call]:
    """Return one call per head."""
    source, options = call.source, call.options
    assert not isinstance(source, Given)
    shifts = options.shift
    assert isinstance(shifts, tuple)
    if "accuracy" in options.stats and "count" not in options.stats:
        options = options._replace(stats=(*options.stats, "count"))
    return [
        call._replace(
            source=source._replace(input=source.input[head]),
            options=options._replace(shift=shift, heads=None, head_weight=None),
        )
        for head, shift in enumerate(shifts)
    ]


def factors(options: Options) -> Sequence[Any]:
    """Return the factor of each head's loss."""
    return options.head_weight or (1,) * (options.heads or 1)


def combined(call: Call, parts: Sequence[tuple[Any, Stats]]) -> tuple[Any, Stats]:
    """Combine the losses and statistics of one call per head."""
    losses, stats = zip(*parts, strict=True)
    each_row, weights = call.options.reduction == "none", np.asarray(factors(call.options))
    found: dict[str, Any] = {}
    for name in call.options.stats:
        values = np.stack([getattr(one, name) for one in stats])
        if name in ROW_STATS or (name == "z_loss" and each_row):
            found[name] = values
        elif name == "accuracy":
            counts = np.stack([one.count for one in stats])
            found[name] = values @ counts / max(counts.sum(), 1)
        else:
            found[name] = weights @ values if name == "z_loss" else values.sum()
    return np.stack(losses) if each_row else weights @ np.stack(losses), Stats(**found)
