"""Several heads with one classifier, computed as one call without heads, or as one call per head.

Head j of H predicts target t + shift[j] from row t of its own hidden states. The loss is sum_j h_j R_j, where h_j is
the head's weight and R_j its reduced loss. For "mean", R_j = sum_i l_ij / D_j with the divisor D_j of the head. So the
loss is a sum over the rows of all heads with row weights h_j / D_j: one call, with one gradient of the classifier.

Class probabilities need one call per head, because a joint call would copy them for each head.
"""

from collections.abc import Callable, Sequence
from typing import Any

from xent.core.arrays import dtype_name
from xent.core.call import Call, Classes, Given, Options, array_of, vocabulary_of
from xent.core.spec import ROW_STATS, Stats

__all__ = ["apart", "combined", "factors", "run"]

Results = tuple[Any, Stats]
Cast = Callable[[Any, Any], Any]


def run(call: Call, run_one: Callable[[Call], Results], xp: Any, cast: Cast) -> Results:
    """Return loss and statistics of a call with several heads. `run_one` runs a call without.

    `xp` has the framework's functions under NumPy's names, and `cast` converts an array to a dtype of `xp`.
    """
    if isinstance(call.target, Classes):
        return run_one(_joined(call, call.target, xp, cast))
    return combined(call, [run_one(one) for one in apart(call)], xp)


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


def combined(call: Call, parts: Sequence[Results], xp: Any) -> Results:
    """Combine the losses and statistics of one call per head."""
    losses, stats = zip(*parts, strict=True)
    each_row = call.options.reduction == "none"
    weights = factors(call.options)

    def total(values: Sequence[Any]) -> Any:
        return sum(value * weight for value, weight in zip(values, weights, strict=True))

    found: dict[str, Any] = {}
    for name in call.options.stats:
        values = [getattr(one, name) for one in stats]
        if name in ROW_STATS or (name == "z_loss" and each_row):
            found[name] = xp.stack(values)
        elif name == "accuracy":
            count = sum(one.count for one in stats)
            found[name] = sum(value * one.count for value, one in zip(values, stats, strict=True)) / (
                count + (count == 0)
            )
        else:
            found[name] = total(values) if name == "z_loss" else sum(values)
    return xp.stack(losses) if each_row else total(losses), Stats(**found)


def _joined(call: Call, given: Classes, xp: Any, cast: Cast) -> Call:
    """Return one call with the rows of all heads."""
    options, shifts, weights = call.options, call.options.shift, call.options.head_weight
    assert isinstance(shifts, tuple)
    wide = xp.float64 if dtype_name(array_of(call)) == "float64" else xp.float32
    target = _moved(cast(given.ids, xp.int64), shifts, options.ignore_index, xp)
    counted = target != options.ignore_index
    weight = None
    if options.sample_weight is not None:
        weight = xp.where(counted, _moved(cast(options.sample_weight, wide), shifts, 0, xp), 0)
    if weight is None and (options.reduction == "mean" or weights is not None):
        weight = cast(counted, wide)
    if options.reduction == "mean":
        weight = weight * _weighed(_inverse(call, target, weight, xp, cast), weights, xp)
    else:
        weight = _weighed(weight, weights, xp)
    reduction = "none" if options.reduction == "none" else "sum"
    options = options._replace(
        sample_weight=weight, normalizer=None, shift=0, heads=None, head_weight=None, reduction=reduction
    )
    return call._replace(target=Classes(target), options=options)


def _inverse(call: Call, target: Any, weight: Any, xp: Any, cast: Cast) -> Any:
    """Return 1 / D_j, (H, 1, ..., 1), or 0 if D_j is 0. `target` and `weight` are (H, ..., T)."""
    axes, options = tuple(range(1, target.ndim)), call.options
    parts = weight
    if options.normalizer is None:
        known = (target >= 0) & (target < vocabulary_of(call.source)) & (target != options.ignore_index)
        if options.weight is not None:
            parts = weight * cast(options.weight, weight.dtype)[xp.where(known, target, 0)]
        divisor = xp.where(known, parts, 0).sum(axis=axes, keepdims=True)
    else:
        divisor = xp.zeros_like(weight.sum(axis=axes, keepdims=True)) + options.normalizer
    return xp.where(divisor == 0, 0, 1 / divisor)


def _weighed(values: Any, factors: Sequence[Any] | None, xp: Any) -> Any:
    """Multiply values (H, ...) by the factor of each head."""
    if factors is None:
        return values
    return xp.stack([values[head] * factor for head, factor in enumerate(factors)])


def _moved(values: Any, shifts: tuple[int, ...], fill: Any, xp: Any) -> Any:
    """Return an array (H, ..., T) with values[..., t + shift[j]] at [j, ..., t], and `fill` past the end."""
    length = values.shape[-1]
    steps = [min(shift, length) for shift in shifts]
    missing = xp.zeros_like(values[..., : max(steps)]) + fill
    padded = xp.concatenate([values, missing], -1)
    return xp.stack([padded[..., step : step + length] for step in steps])
