"""Validate options that are numbers or names. Errors name the option, its value and what is allowed."""

import math
import numbers
from typing import Any

from xent.core.arrays import FLOAT_DTYPES, INTEGER_DTYPES, describe, dtype_name, framework_of, is_tracing, number_of
from xent.core.spec import REDUCTIONS, STAT_NAMES, Heads, LossSpec, bounded

__all__ = [
    "check_number",
    "check_numbers",
    "check_reduction",
    "check_shift_and_workspace",
    "check_stats",
    "heads_of",
    "is_int",
    "loss_spec",
]


def check_shift_and_workspace(shift: Any, workspace: int | None) -> None:
    """Raise ValueError for an invalid shift or workspace."""
    heads = shift if isinstance(shift, (tuple, list)) else (shift,)
    if not heads or not all(is_int(one) and one >= 0 for one in heads):
        several = "" if heads and heads[0] is shift else ", or a tuple with one such int for each head"
        raise ValueError(f"shift must be an int >= 0{several}, got {shift!r}")
    if workspace is not None and (not is_int(workspace) or workspace <= 0):
        raise ValueError(f"workspace must be None or a positive int, a number of bytes; got {workspace!r}")


def heads_of(framework: str, shift: Any, head_weight: Any, reduction: str) -> Heads | None:
    """Return the heads of a validated tuple `shift`, or None for a number. Raise for weights that do not fit."""
    shifts = tuple(shift) if isinstance(shift, (tuple, list)) else None
    if head_weight is None:
        return None if shifts is None else Heads(shifts)
    if shifts is None:
        raise ValueError(f"head_weight needs a tuple as shift, with one entry for each head; got shift={shift}")
    if not isinstance(head_weight, (tuple, list)):
        raise TypeError(f"head_weight must be a tuple of numbers, one for each head; got {describe(head_weight)}")
    if len(head_weight) != len(shifts):
        raise ValueError(f"head_weight must have {len(shifts)} entries, as shift={shifts} has; got {len(head_weight)}")
    if reduction == "none":
        raise ValueError(
            "head_weight would be ignored with reduction='none', which returns the rows of each head: leave it out, "
            "and multiply the rows by it"
        )
    weights = tuple(number_of(framework, weight) for weight in head_weight)
    if not is_tracing(framework):
        for head, weight in enumerate(weights):
            check_number(f"head_weight[{head}]", weight, "finite", math.isfinite)
    return Heads(shifts, weights)


def check_numbers(
    label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float, normalizer: float | None
) -> None:
    """Raise TypeError or ValueError for an option that is not a number, or out of range."""
    check_number("label_smoothing", label_smoothing, "in [0, 1]", lambda value: 0 <= value <= 1)
    check_number("z_loss", z_loss, "finite and >= 0", lambda value: 0 <= value < math.inf)
    if softcap is not None:
        check_number("softcap", softcap, "finite and > 0, or None", lambda value: 0 < value < math.inf)
    check_number("logit_scale", logit_scale, "finite", math.isfinite)
    if normalizer is not None:
        check_number("normalizer", normalizer, "finite and >= 0", lambda value: 0 <= value < math.inf)


def check_number(name: str, value: Any, allowed: str, holds: Any) -> None:
    """Raise TypeError for a value that is not a number, ValueError for one for which `holds` is false."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, {allowed}; got {describe(value)}")
    if not holds(value):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def check_reduction(reduction: Any) -> str:
    """Return the name of a reduction. Raise ValueError for other values."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    return reduction


def check_stats(stats: Any, allowed: tuple[str, ...], of_entropy: str = "") -> tuple[str, ...]:
    """Return the names of statistics in the order of `allowed`. Raise TypeError or ValueError for other names.

    `of_entropy` is added to the message about the name "entropy".
    """
    listed = ", ".join(map(repr, allowed))
    if not isinstance(stats, (tuple, list, set, frozenset)):
        raise TypeError(f"stats must be a tuple, list or set of names from {listed}; got {stats!r}")
    unknown = [name for name in stats if name not in allowed]
    if unknown:
        more = of_entropy if unknown[0] == "entropy" else ""
        raise ValueError(f"stats must be names from {listed}; got {unknown[0]!r}{more}")
    return tuple(name for name in allowed if name in stats)


def loss_spec(
    framework: str,
    *,
    reduction: Any,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    stats: Any,
) -> LossSpec:
    """Check the options that both functions share, and for which no array is needed."""
    check_reduction(reduction)
    if not is_int(ignore_index):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must fit in 64 bits, got {ignore_index}")
    names = check_stats(stats, STAT_NAMES)
    label_smoothing, z_loss, softcap, logit_scale = (
        number_of(framework, value) for value in (label_smoothing, z_loss, softcap, logit_scale)
    )
    cap, scale = _scale(framework, "softcap", softcap), _scale(framework, "logit_scale", logit_scale)
    if not is_tracing(framework):
        smoothing, z_factor, cap, scale = (_number(framework, value) for value in (label_smoothing, z_loss, cap, scale))
        check_numbers(smoothing, z_factor, cap, scale, None)
    return LossSpec(
        reduction,
        ignore_index,
        label_smoothing,
        z_loss,
        bounded(softcap),
        logit_scale,
        names,
    )


def _scale(framework: str, name: str, value: Any) -> Any:
    """Return a softcap or logit scale as a number; for a 0-d PyTorch tensor return 1, which is valid for both."""
    if framework != "torch" or framework_of(value) != framework:
        return value
    if len(value.shape) or dtype_name(value) not in (*FLOAT_DTYPES, *INTEGER_DTYPES):
        raise TypeError(f"{name} must be a number or a 0-d tensor of one, got {describe(value)}")
    return 1.0


def _number(framework: str, value: Any) -> Any:
    """Return an option as a number; for a 0-d MLX array, whose value is not read, return 1, which is valid for all."""
    if framework == "mlx" == framework_of(value) and not value.shape and dtype_name(value) in FLOAT_DTYPES:
        return 1.0
    return value


def is_int(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy, and no boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
