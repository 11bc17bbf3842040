"""Several heads with one classifier, computed as one call without heads, or as one call per head.

Head j of H predicts target t + shift[j] from row t of its own hidden states. The loss is sum_j h_j R_j, where h_j is
the head's weight and R_j its reduced loss. For "mean", R_j = sum_i l_ij / D_j with the divisor D_j of the head. So the
loss is a sum over the rows of all heads with row weights h_j / D_j: one call, with one gradient of the classifier.

Class probabilities need one call per head, because a joint call would copy them for each head.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from xent.core.arrays import INTEGER_DTYPES, dtype_name
from xent.core.spec import ROW_STATS, LinearCall, Stats

__all__ = ["apart", "combined", "run"]

Results = tuple[Any, Stats]
Cast = Callable[[Any, Any], Any]


def run(
    call: LinearCall, run_one: Callable[[LinearCall], Results], xp: Any, cast: Callable[[Any, Any], Any]
) -> Results:
    """Return loss and statistics of a call with `heads`. `run_one` runs a call without.

    `xp` has the framework's functions under NumPy's names, and `cast` converts an array to a dtype of `xp`.
    """
    if dtype_name(call.target) in INTEGER_DTYPES:
        return run_one(_joined(call, xp, cast))
    return combined(call, [run_one(one) for one in apart(call)], xp)


def apart(call: LinearCall) -> list[LinearCall]:
    """Return one call per head."""
    spec = call.loss
    if "accuracy" in spec.stats and "count" not in spec.stats:
        spec = replace(spec, stats=(*spec.stats, "count"))
    assert call.heads is not None
    return [
        replace(call, input=call.input[head], shift=shift, heads=None, loss=spec)
        for head, shift in enumerate(call.heads.shift)
    ]


def combined(call: LinearCall, parts: Sequence[Results], xp: Any) -> Results:
    """Combine the losses and statistics of one call per head."""
    losses, stats = zip(*parts, strict=True)
    each_row = call.loss.reduction == "none"
    assert call.heads is not None
    weights = call.heads.weight or (1,) * len(parts)

    def total(values: Sequence[Any]) -> Any:
        return sum(value * weight for value, weight in zip(values, weights, strict=True))

    found: dict[str, Any] = {}
    for name in call.loss.stats:
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


def _joined(call: LinearCall, xp: Any, cast: Cast) -> LinearCall:
    """Return one call with the rows of all heads; targets are class indices."""
    assert call.heads is not None
    spec, shifts, factors = call.loss, call.heads.shift, call.heads.weight
    wide = xp.float64 if dtype_name(call.input) == "float64" else xp.float32
    target = _moved(cast(call.target, xp.int64), shifts, spec.ignore_index, xp)
    counted = target != spec.ignore_index
    weight = None
    if call.sample_weight is not None:
        weight = xp.where(counted, _moved(cast(call.sample_weight, wide), shifts, 0, xp), 0)
    if weight is None and (spec.reduction == "mean" or factors is not None):
        weight = cast(counted, wide)
    if spec.reduction == "mean":
        weight = weight * _weighed(_inverse(call, target, weight, xp, cast), factors, xp)
    else:
        weight = _weighed(weight, factors, xp)
    reduction = "none" if spec.reduction == "none" else "sum"
    return replace(
        call,
        target=target,
        sample_weight=weight,
        normalizer=None,
        heads=None,
        loss=replace(spec, reduction=reduction),
    )


def _inverse(call: LinearCall, target: Any, weight: Any, xp: Any, cast: Cast) -> Any:
    """Return 1 / D_j, (H, 1, ..., 1), or 0 if D_j is 0. `target` and `weight` are (H, ..., T)."""
    axes = tuple(range(1, target.ndim))
    parts = weight
    if call.normalizer is None:
        vocabulary = call.linear_weight.shape[0]
        known = (target >= 0) & (target < vocabulary) & (target != call.loss.ignore_index)
        if call.weight is not None:
            parts = weight * cast(call.weight, weight.dtype)[xp.where(known, target, 0)]
        divisor = xp.where(known, parts, 0).sum(axis=axes, keepdims=True)
    else:
        divisor = xp.zeros_like(weight.sum(axis=axes, keepdims=True)) + call.normalizer
    return xp.where(divisor == 0, 0, 1 / divisor)


def _weighed(values: Any, factors: tuple[float, ...] | None, xp: Any) -> Any:
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
