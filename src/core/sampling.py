"""Validation of the temperature, and of the classes that a sampler allowed (`Support`)."""

import math
from dataclasses import replace
from typing import Any

from xent.core.arrays import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    describe,
    dtype_name,
    framework_of,
    is_tracing,
    number_of,
    one_framework,
    wide,
)
from xent.core.spec import LinearCall, LogitsCall, LossSpec, Support, bounded
from xent.core.validate_options import check_number

__all__ = ["of_log_probs", "sampled", "tempered"]


def sampled(
    call: LogitsCall | LinearCall, temperature: Any, support: Support | None, names: tuple[str, ...]
) -> LogitsCall | LinearCall:
    """Return the call as one of log-probabilities with these statistics; validate temperature and support."""
    first = {"logits": call.logits} if isinstance(call, LogitsCall) else {"input": call.input}
    number = number_of(framework_of(next(iter(first.values()))), temperature)
    is_number = number is not temperature or framework_of(number) is None
    framework = one_framework(**first, **_arrays_of(None if is_number else temperature, support))
    rows = tuple(call.target.shape)
    spec, each = _tempered(framework, call.loss, number, rows, is_number)
    _check_support(support, math.prod(rows))
    return replace(call, loss=of_log_probs(spec, names), temperature=each, support=support)


def of_log_probs(spec: LossSpec, names: tuple[str, ...], temperature: Any = None) -> LossSpec:
    """Return the options of log-probabilities with these statistics. Fold a temperature T into scale and softcap.

    x = k tanh(s z / k) / T = k' tanh(s' z / k') with k' = k / T and s' = s / T.
    """
    scale, cap = spec.logit_scale, spec.softcap
    if temperature is not None:
        scale, cap = tempered(scale, temperature), None if cap is None else tempered(cap, temperature)
    return replace(spec, logit_scale=scale, softcap=cap, stats=names, exact=True, accuracy_of_rows=True)


def tempered(value: Any, temperature: Any) -> Any:
    """Return a logit scale or softcap, a number or a 0-d array, divided by a temperature. No 16-bit dtype rounds it."""
    return wide(value) / bounded(temperature)


def _arrays_of(temperature: Any, support: Support | None) -> dict[str, Any]:
    """Return the arrays among temperature and support, by the caller's names of them."""
    named = {} if temperature is None else {"temperature": temperature}
    if support is None:
        return named
    if not isinstance(support, Support):
        raise TypeError(f"support must be a xent.Support or None, got {describe(support)}")
    for name in ("ids", "offsets"):
        part = getattr(support, name)
        if framework_of(part) is None:
            raise TypeError(f"support.{name} must be a 1-d integer array, got {describe(part)}")
        named[f"support.{name}"] = part
    return named


def _tempered(
    framework: str, spec: LossSpec, temperature: Any, rows: tuple[int, ...], is_number: bool
) -> tuple[LossSpec, Any]:
    """Return the options, and the temperatures per row, or None if one number is for all rows.

    One number is folded into the options. A 0-d MLX array is treated as a temperature per row, because its value is not
    known yet and may be invalid.
    """
    if is_number:
        if framework_of(temperature) is None and not is_tracing(framework):
            check_number(
                "temperature", temperature, "finite and > 0, or an array of floats", lambda value: 0 < value < math.inf
            )
        return of_log_probs(spec, spec.stats, temperature), None
    if dtype_name(temperature) not in FLOAT_DTYPES:
        raise TypeError(f"temperature must be a number, or an array of floats; got {describe(temperature)}")
    if tuple(temperature.shape) not in ((rows, ()) if framework == "mlx" else (rows,)):
        raise ValueError(
            f"temperature must be a number or have the target's shape {rows}, one for each row; got "
            f"{tuple(temperature.shape)}"
        )
    return spec, temperature


def _check_support(support: Support | None, rows: int) -> None:
    """Raise TypeError or ValueError for a support whose shapes or dtypes do not fit `rows` rows."""
    if support is None:
        return
    for name in ("ids", "offsets"):
        part = getattr(support, name)
        if dtype_name(part) not in INTEGER_DTYPES or len(part.shape) != 1:
            raise TypeError(f"support.{name} must be a 1-d integer array, got {describe(part)}")
    if support.offsets.shape[0] != rows + 1:
        raise ValueError(
            f"support.offsets must have {rows + 1} entries, one more than there are rows of target; got "
            f"{support.offsets.shape[0]}"
        )
