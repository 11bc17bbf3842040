"""The loss and the statistics of a call, from the results of its rows."""

import mlx.core as mx

from xent.backends.mlx.facts import Facts
from xent.backends.mlx.kernels import Found
from xent.core.call import Probabilities

__all__ = ["reduced", "statistics"]


def reduced(values: mx.array, facts: Facts) -> mx.array:
    """Reduce values (N,) of rows by the reduction of the call: to 0-d, or for "none" return them unchanged."""
    if facts.call.options.reduction == "none":
        return values
    total = values.sum()
    return total if facts.divisor is None else mx.where(facts.divisor == 0, 0, total / facts.divisor)


def statistics(found: Found, facts: Facts) -> dict[str, mx.array]:
    """Return the statistics that the options name, (N,) or 0-d."""
    ignored, rows, options = facts.ignored, facts.rows, facts.call.options
    made: dict[str, mx.array] = {}
    for name in options.stats:
        if name == "count":
            made[name] = facts.counted
        elif name == "lse":
            made[name] = _lse(found, facts)
        elif name == "z_loss":
            factor = rows.number("z_loss")
            term = rows.weight * factor * mx.square(_lse(found, facts))
            made[name] = reduced(mx.where(rows.dead | (factor == 0), 0, term), facts)
        elif name == "accuracy":
            assert found.predictions is not None
            correct = mx.equal(found.predictions, _truth(facts)) & ~ignored
            correct = correct if facts.invalid is None else correct & ~facts.invalid
            right = correct.astype(found.loss.dtype)
            made[name] = right if options.accuracy_of_rows else right.sum() / mx.maximum(facts.counted, 1)
        else:
            value = mx.where(ignored, -1 if name == "predictions" else 0, getattr(found, name))
            made[name] = value if name != "nll" or facts.invalid is None else mx.where(facts.invalid, mx.nan, value)
    return made


def _lse(found: Found, facts: Facts) -> mx.array:
    assert found.norm is not None
    peak, log_sum = found.norm[:, 0], found.norm[:, 1]
    return mx.where(facts.ignored, 0, mx.where(peak == -mx.inf, peak, peak + log_sum))


def _truth(facts: Facts) -> mx.array:
    """Return the target class of each row, (N,); for class probabilities the most probable class."""
    target = facts.call.target
    if not isinstance(target, Probabilities):
        assert facts.rows.target is not None
        return facts.rows.target
    best = mx.argmax(target.values, axis=-1).astype(mx.int32)
    return best if target.order is None else best[mx.maximum(target.order, 0)]
