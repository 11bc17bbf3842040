"""Validate options that are numbers or names. Errors name the option, its value and what is allowed."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from xent.core.arrays import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    PLAIN,
    describe,
    dtype_name,
    framework_of,
    is_tracing,
    number_of,
    shown,
    wide,
)
from xent.core.call import Activation, Options
from xent.core.spec import DIVERGENCES, REDUCTIONS, STAT_NAMES, bounded

__all__ = [
    "check_kind",
    "check_name",
    "check_number",
    "check_numbers",
    "check_reduction",
    "check_stats",
    "divided",
    "head_weights",
    "is_int",
    "loss_options",
    "one_shift",
    "plain_int",
    "shift_and_workspace",
]

_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "label_smoothing": ("in [0, 1]", lambda value: 0 <= value <= 1),
    "z_loss": ("finite and >= 0", lambda value: 0 <= value < math.inf),
    "softcap": ("finite and > 0, or None", lambda value: 0 < value < math.inf),
    "logit_scale": ("finite", lambda value: -math.inf < value < math.inf),
    "normalizer": ("finite and >= 0", lambda value: 0 <= value < math.inf),
    "beta": ("in [0, 1]", lambda value: 0 <= value <= 1),
    "head_weight": ("finite", lambda value: -math.inf < value < math.inf),
    "temperature": ("finite and > 0", lambda value: 0 < value < math.inf),
}


def loss_options(
    framework: str,
    *,
    reduction: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    logit_scale: Any,
    stats: Any,
) -> tuple[Activation, Options]:
    """Check the options of the losses for which no other array is needed."""
    check_reduction(reduction)
    if not is_int(ignore_index):
        raise TypeError(f"ignore_index must be an int, got {shown(ignore_index)}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must fit in 64 bits, got {ignore_index}")
    stats = check_stats(stats, STAT_NAMES)
    smoothing = _number(framework, "label_smoothing", label_smoothing)
    options = Options(reduction, plain_int(ignore_index), smoothing, _number(framework, "z_loss", z_loss), stats=stats)
    cap = bounded(_number(framework, "softcap", softcap))
    return Activation(_number(framework, "logit_scale", logit_scale), cap), options


def _number(framework: str, name: str, value: Any) -> Any:
    """Return a checked number, one of NumPy as one of Python; or a 0-d tensor or MLX array, whose value is not read."""
    if type(value) not in PLAIN:
        value = number_of(framework, value)
        if _is_array(framework, name, value):
            return value
    check_number(framework, name, value)
    return value


def _is_array(framework: str, name: str, value: Any) -> bool:
    """Return whether an option is a 0-d PyTorch tensor or MLX array, whose value is not read.

    Raise TypeError for other tensors. Other MLX arrays are no numbers.
    """
    if framework_of(value) != framework:
        return False
    if framework == "mlx":
        return not value.shape and dtype_name(value) in FLOAT_DTYPES
    if framework != "torch":
        return False
    if len(value.shape) or dtype_name(value) not in (*FLOAT_DTYPES, *INTEGER_DTYPES):
        raise TypeError(f"{name} must be a number or a 0-d tensor of one, got {describe(value)}")
    return True


def divided(activation: Activation, temperature: Any) -> Activation:
    """Fold a temperature T that is one number into scale and softcap. No 16-bit dtype rounds the quotients.

    x = k tanh(s z / k) / T = k' tanh(s' z / k') with k' = k / T and s' = s / T.
    """
    heat, cap = bounded(temperature), activation.softcap
    if framework_of(heat) == "torch":  # while a compiler traces
        heat = heat.where(heat > 0, math.nan)
    return Activation(wide(activation.logit_scale) / heat, None if cap is None else wide(cap) / heat)


def shift_and_workspace(shift: Any, workspace: Any) -> tuple[int | tuple[int, ...], int | None]:
    """Return shift, of several heads a tuple, and workspace, as Python ints. Raise if one is invalid."""
    several = isinstance(shift, (tuple, list))
    shifts = tuple(shift) if several else (shift,)
    integers = all(map(is_int, shifts))
    if not shifts or not integers or min(shifts) < 0:
        more = ", or a tuple with one such int for each head" if several else ""
        error = ValueError if integers else TypeError
        raise error(f"shift must be an int >= 0{more}, got {shown(shift)}")
    if workspace is not None and (not is_int(workspace) or workspace <= 0):
        error = ValueError if is_int(workspace) else TypeError
        raise error(f"workspace must be None or a positive int, a number of bytes; got {shown(workspace)}")
    plain = tuple(map(plain_int, shifts))
    return plain if several else plain[0], None if workspace is None else plain_int(workspace)


def one_shift(shift: Any) -> Any:
    """Return a shift. Raise ValueError for a tuple, one entry for each head, of a function that has no heads."""
    if isinstance(shift, (tuple, list)):
        raise ValueError(
            f"shift must be an int >= 0, since only xent.linear_cross_entropy takes a tuple for several heads; got "
            f"{shown(shift)}"
        )
    return shift


def head_weights(
    framework: str, shift: int | tuple[int, ...], head_weight: Any, reduction: str
) -> tuple[Any, ...] | None:
    """Return the weights of the heads that a validated `shift` names; None for 1 each. Raise if they do not fit."""
    if head_weight is None:
        return None
    if not isinstance(shift, tuple):
        raise ValueError(f"head_weight needs a tuple as shift, with one entry for each head; got shift={shift}")
    if not isinstance(head_weight, (tuple, list)):
        raise TypeError(f"head_weight must be a tuple of numbers, one for each head; got {describe(head_weight)}")
    if len(head_weight) != len(shift):
        raise ValueError(f"head_weight must have {len(shift)} entries, as shift={shift} has; got {len(head_weight)}")
    if reduction == "none":
        raise ValueError(
            "head_weight would be ignored with reduction='none', which returns the rows of each head: leave it out, "
            "and multiply the rows by it"
        )
    weights = tuple(number_of(framework, weight) for weight in head_weight)
    check_numbers(framework, **{f"head_weight[{head}]": weight for head, weight in enumerate(weights)})
    return weights


def check_numbers(framework: str, other: str = "", **values: Any) -> None:
    """Raise TypeError or ValueError for an option, by name, that is not a number, or out of range.

    A softcap or normalizer may be None. `other` is what else is allowed. While a compiler traces,
    tensors are not checked: numbers of NumPy are tensors then.
    """
    for name, value in values.items():
        check_number(framework, name, value, other)


def check_number(framework: str, name: str, value: Any, other: str = "") -> None:
    """Check one option as `check_numbers` does."""
    if value is None and name in ("softcap", "normalizer"):
        return
    allowed, holds = _RANGES.get(name) or _RANGES["head_weight"]
    if type(value) not in (int, float) and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        if framework_of(value) == framework and is_tracing(framework):
            return
        raise TypeError(f"{name} must be a number, {allowed}{other}; got {describe(value)}")
    if not holds(value):
        raise ValueError(f"{name} must be {allowed}{other}, got {value!r}")


def check_kind(framework: str, kind: Any, beta: Any) -> str:
    """Return the name of a divergence. Raise TypeError or ValueError for other values, and a beta that it has not."""
    check_name("kind", kind, DIVERGENCES)
    check_numbers(framework, beta=beta)
    if kind != "kl" and framework_of(beta) is None and beta != 0:
        raise ValueError(f"beta must be 0 with kind='tv', got {beta!r}: it selects one of kind='kl'")
    return str(kind)


def check_reduction(reduction: Any) -> str:
    """Return the name of a reduction. Raise TypeError or ValueError for other values."""
    return check_name("reduction", reduction, REDUCTIONS)


def check_name(option: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return one of the allowed names. Raise TypeError or ValueError for other values of that option."""
    if not isinstance(value, str) or value not in allowed:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{option} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}")
    return value


def check_stats(stats: Any, allowed: tuple[str, ...], of_entropy: str = "") -> tuple[str, ...]:
    """Return the names of statistics in the order of `allowed`. Raise TypeError or ValueError for other names.

    `of_entropy` is added to the message about the name "entropy".
    """
    if stats == ():
        return ()
    listed = ", ".join(map(repr, allowed))
    if not isinstance(stats, (tuple, list, set, frozenset)):
        raise TypeError(f"stats must be a tuple, list or set of names from {listed}; got {shown(stats)}")
    unknown = [name for name in stats if name not in allowed]
    if unknown:
        more = of_entropy if unknown[0] == "entropy" else ""
        raise ValueError(f"stats must be names from {listed}; got {shown(unknown[0])}{more}")
    return tuple(name for name in allowed if name in stats)


def is_int(value: Any) -> bool:
    """Return whether a value is an integer of Python or NumPy, and no boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def plain_int(value: Any) -> int:
    """Return an integer of NumPy as one of Python. One of Python may be symbolic, and is not converted."""
    return value if isinstance(value, int) else int(value)
