"""What is found out about the rows, and how it becomes the loss and the statistics that the caller gets."""

import mlx.core as mx

from xent.backends.mlx.facts import Facts
from xent.backends.mlx.kernels import Asked, Found
from xent.core.spec import LossSpec, Stats

__all__ = ["asked_for", "reduced", "stats_of"]


def asked_for(spec: LossSpec, grad: bool, norm: bool) -> Asked:
    """Return what a row kernel has to find out for the statistics, and the gradient or the norm."""
    names = spec.stats
    return Asked(
        grad=grad,
        norm=norm or "lse" in names or "z_loss" in names,
        nll="nll" in names,
        entropy="entropy" in names,
        predictions="predictions" in names or "accuracy" in names,
        dead=bool(names),
    )


def reduced(values: mx.array, facts: Facts) -> mx.array:
    """Return per-row values (N,) as the spec's reduction has them: 0-d, or as they are for "none"."""
    if facts.spec.reduction == "none":
        return values
    total = values.sum()
    if facts.divisor is None:
        return total
    return mx.where(facts.divisor == 0, 0, total / facts.divisor)


def stats_of(found: Found, facts: Facts, shape: tuple[int, ...]) -> Stats:
    """Return the statistics that the spec names, per-row ones in `shape`."""
    made = {name: mx.stop_gradient(_STATS[name](found, facts)) for name in facts.spec.stats}
    return Stats(**{name: value.reshape(shape) if value.ndim else value for name, value in made.items()})


def _lse(found: Found, facts: Facts) -> mx.array:
    assert found.norm is not None
    peak, log_sum = found.norm[:, 0], found.norm[:, 1]
    return mx.where(facts.ignored, 0, mx.where(peak == -mx.inf, peak, peak + log_sum))


def _nll(found: Found, facts: Facts) -> mx.array:
    assert found.nll is not None
    values = mx.where(facts.ignored, 0, found.nll)
    return values if facts.invalid is None else mx.where(facts.invalid, mx.nan, values)


def _entropy(found: Found, facts: Facts) -> mx.array:
    assert found.entropy is not None
    return mx.where(facts.ignored, 0, found.entropy)


def _predictions(found: Found, facts: Facts) -> mx.array:
    assert found.predictions is not None
    return mx.where(facts.ignored, -1, found.predictions)


def _z_loss(found: Found, facts: Facts) -> mx.array:
    term = facts.rows.weight * facts.rows.numbers[1] * mx.square(_lse(found, facts))
    return reduced(mx.where(facts.rows.dead, 0, term), facts)


def _accuracy(found: Found, facts: Facts) -> mx.array:
    correct = (_predictions(found, facts) == _truth(facts)) & ~facts.ignored
    if facts.invalid is not None:
        correct = correct & ~facts.invalid
    return correct.sum().astype(found.loss.dtype) / mx.maximum(facts.counted, 1)


def _count(found: Found, facts: Facts) -> mx.array:
    return facts.counted


def _truth(facts: Facts) -> mx.array:
    """Return the class that each row should have, (N,); the most probable for probabilities."""
    if facts.rows.target is not None:
        return facts.rows.target
    given = facts.probability_block(0, facts.count)
    assert given is not None
    return mx.argmax(given, axis=-1).astype(mx.int32)


_STATS = {
    "lse": _lse,
    "nll": _nll,
    "entropy": _entropy,
    "predictions": _predictions,
    "z_loss": _z_loss,
    "accuracy": _accuracy,
    "count": _count,
}
