"""Compute the loss and the statistics from the results of the rows, and attach their gradients."""

import mlx.core as mx

from xent.backends.mlx.autograd import scaled, with_gradients
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.kernels import Found
from xent.backends.mlx.linear import Chunks
from xent.backends.mlx.logits import Logits
from xent.backends.mlx.supported import Supported
from xent.backends.mlx.tracing import is_differentiated
from xent.core.spec import DIFFERENTIABLE, Stats

__all__ = ["run"]


def _reduced(values: mx.array, facts: Facts) -> mx.array:
    """Reduce per-row values (N,) by the reduction of the spec: to 0-d, or for "none" return them unchanged."""
    if facts.spec.reduction == "none":
        return values
    total = values.sum()
    if facts.divisor is None:
        return total
    return mx.where(facts.divisor == 0, 0, total / facts.divisor)


def run(
    given: dict[str, mx.array],
    target: mx.array | None,
    rows: Logits | Chunks | Supported,
    facts: Facts,
    shape: tuple[int, ...],
) -> tuple[mx.array, Stats]:
    """Return the loss and the statistics that the spec names; those per row have the shape `shape`.

    `given` has the arrays that may have a gradient; `target`, class probabilities (..., V), may have one too. For a
    mean or sum, the gradients that are expected are computed with the loss. Other gradients, those of reduction "none",
    and that of the target are computed later from the logits. With "none" the statistics lse, nll and entropy have
    gradients too.
    """
    reduces = facts.spec.reduction != "none"
    expected = _expected(given) if reduces else []
    found, kept = rows.forward(expected)

    def gradients(upstream: dict[str, mx.array | None]) -> list[mx.array]:
        made, now, first = dict(kept), facts, expected
        kept.clear()
        if not reduces:
            now, first = facts.with_upstream(upstream, found.entropy), _expected(given)
        # Gradients that were not expected are computed separately, so that MLX evaluates them only if needed.
        for names in (first, *([name] for name in given if name not in first)):
            if not made.keys() >= set(names):
                made |= rows.backward(now, found, names)
        factor = facts.factor(upstream["loss"]) if reduces else None
        grads = [scaled(made.pop(name), factor, array.dtype) for name, array in given.items()]
        if target is not None and not isinstance(rows, Supported):
            grads.append(scaled(rows.of_target(now, found).reshape(target.shape), factor, target.dtype))
        return grads

    named = {"loss": _reduced(found.loss, facts)} | _statistics(found, facts)
    linked = ["loss", *(name for name in DIFFERENTIABLE if name in named and not reduces)]
    inputs = [*given.values(), *([] if target is None else [target])]
    named |= with_gradients({name: named[name] for name in linked}, inputs, gradients)
    flat = {name: value.reshape(shape) if value.ndim else value for name, value in named.items()}
    return flat.pop("loss"), Stats(**flat)


def _expected(given: dict[str, mx.array]) -> list[str]:
    return [name for name, array in given.items() if is_differentiated(array)]


def _statistics(found: Found, facts: Facts) -> dict[str, mx.array]:
    """Return the statistics that the spec names, (N,) or 0-d."""
    ignored, rows, names = facts.ignored, facts.rows, facts.spec.stats
    if not names:
        return {}
    assert found.norm is not None
    peak, log_sum = found.norm[:, 0], found.norm[:, 1]
    lse = mx.where(ignored, 0, mx.where(peak == -mx.inf, peak, peak + log_sum))
    made = {"lse": lse, "count": facts.counted}
    if "z_loss" in names:
        factor = rows.number("z_loss")
        term = rows.weight * factor * mx.square(lse)
        made["z_loss"] = _reduced(mx.where(rows.dead | (factor == 0), 0, term), facts)
    if found.nll is not None:
        nll = mx.where(ignored, 0, found.nll)
        made["nll"] = nll if facts.invalid is None else mx.where(facts.invalid, mx.nan, nll)
    if found.entropy is not None:
        made["entropy"] = mx.where(ignored, 0, found.entropy)
    if found.predictions is not None:
        made["predictions"] = mx.where(ignored, -1, found.predictions)
        correct = (made["predictions"] == _truth(facts)) & ~ignored
        correct = correct if facts.invalid is None else correct & ~facts.invalid
        right = correct.astype(found.loss.dtype)
        made["accuracy"] = right if facts.spec.accuracy_of_rows else right.sum() / mx.maximum(facts.counted, 1)
    for name in ("log_sum_sq_probs", "mean_logit"):
        value = getattr(found, name)
        if value is not None:
            made[name] = mx.where(ignored, 0, value)
    return {name: made[name] for name in names}


def _truth(facts: Facts) -> mx.array:
    """Return the target class of each row, (N,); for class probabilities the most probable class."""
    if facts.rows.target is not None:
        return facts.rows.target
    given = facts.probability_block(0, facts.count)
    assert given is not None
    return mx.argmax(given, axis=-1).astype(mx.int32)
