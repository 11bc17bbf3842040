"""Validate options and arrays that several functions take. Errors name the argument, its value and what is allowed."""

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
from xent.core.call import Activation, Options, Shards
from xent.core.spec import REDUCTIONS, STAT_NAMES, QuantizedWeight, VocabParallel, bounded

__all__ = [
    "check_classifier",
    "check_dtype",
    "check_int",
    "check_name",
    "check_numbers",
    "check_sequence",
    "check_shape",
    "check_stats",
    "check_tokens",
    "check_weights",
    "class_axis",
    "divided",
    "head_weights",
    "loss_options",
    "one_shift",
    "parts_of",
    "shards_of",
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
_REAL = {"torch": (*FLOAT_DTYPES, *INTEGER_DTYPES), "mlx": FLOAT_DTYPES}
"""The dtypes of 0-d arrays that may be numbers."""


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
    **others: Any,
) -> tuple[Activation, Options]:
    """Check the options of the losses for which no other array is needed; `others` are added unchecked."""
    check_name("reduction", reduction, REDUCTIONS)
    ignore_index = check_int("ignore_index", ignore_index)
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must fit in 64 bits, got {ignore_index}")
    given = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap, "logit_scale": logit_scale}
    smoothing, z_loss, cap, scale = check_numbers(framework, given, arrays=True)
    stats = check_stats(stats, STAT_NAMES)
    return Activation(scale, cap), Options(reduction, ignore_index, smoothing, z_loss, stats=stats, **others)


def check_numbers(framework: str, given: dict[str, Any], other: str = "", arrays: bool = False) -> list[Any]:
    """Return options, by name, that must be numbers: those of NumPy as Python numbers, a softcap of at most `LARGEST`.

    Raise TypeError or ValueError for one that is no number, or out of range. A softcap or normalizer may be None.
    `other` is what else is allowed. If `arrays`, an option may be a 0-d PyTorch tensor or MLX array, whose value is not
    read. While a compiler traces, tensors are not checked: numbers of NumPy are tensors then.
    """
    made: list[Any] = []
    for name, value in given.items():
        if type(value) not in PLAIN:
            value = number_of(framework, value)
        if value is None and name in ("softcap", "normalizer"):
            made.append(None)
            continue
        allowed, holds = _RANGES.get(name) or _RANGES["head_weight"]
        if type(value) in (int, float) or (type(value) is not bool and isinstance(value, numbers.Real)):
            if not holds(value):
                raise ValueError(f"{name} must be {allowed}{other}, got {value!r}")
            made.append(bounded(value) if name == "softcap" else value)
            continue
        is_array = framework_of(value) == framework
        if not (arrays and _is_real(framework, value)):
            if is_array and arrays and framework == "torch":
                raise TypeError(f"{name} must be a number or a 0-d tensor of one, got {describe(value)}")
            if not (is_array and is_tracing(framework)):
                raise TypeError(f"{name} must be a number, {allowed}{other}; got {describe(value)}")
        made.append(value)
    return made


def _is_real(framework: str, value: Any) -> bool:
    """Return whether a value is a 0-d array of the framework and of a dtype that a number may have."""
    return framework_of(value) == framework and not value.shape and dtype_name(value) in _REAL.get(framework, ())


def check_int(name: str, value: Any, allowed: str = "an int,", least: int | None = None) -> int:
    """Return an integer of Python or NumPy as one of Python. Raise TypeError, or ValueError if it is below `least`."""
    if type(value) is int and least is None:
        return value
    if not _is_int(value) or (least is not None and value < least):
        raise (ValueError if _is_int(value) else TypeError)(f"{name} must be {allowed} got {shown(value)}")
    return value if isinstance(value, int) else int(value)  # one of Python may be symbolic, and is not converted


def _is_int(value: Any) -> bool:
    """Return whether a value is an integer of Python or NumPy, and no boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


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
    if workspace is not None:
        workspace = check_int("workspace", workspace, "None or a positive int, a number of bytes;", 1)
    if not isinstance(shift, (tuple, list)):
        return check_int("shift", shift, "an int >= 0,", 0), workspace
    integers = all(map(_is_int, shift))
    if not shift or not integers or min(shift) < 0:
        raise (ValueError if integers else TypeError)(
            f"shift must be an int >= 0, or a tuple with one such int for each head, got {shown(shift)}"
        )
    return tuple(check_int("shift", one) for one in shift), workspace


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
    return tuple(check_numbers(framework, {f"head_weight[{head}]": one for head, one in enumerate(head_weight)}))


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


def check_dtype(name: str, array: Any, allowed: tuple[str, ...] = FLOAT_DTYPES) -> None:
    """Raise TypeError for an array of another dtype."""
    if dtype_name(array) not in allowed:
        dtypes = (
            "must have an integer dtype,"
            if "int64" in allowed
            else f"must have one of the dtypes {', '.join(allowed)};"
        )
        raise TypeError(f"{name} {dtypes} got {describe(array)}")


def check_shape(array: Any, shape: tuple[Any, ...], message: str) -> None:
    """Raise ValueError for an array of another shape. `message` has two places, for the right and for its shape."""
    if tuple(array.shape) != shape:
        raise ValueError(message.format(shape, tuple(array.shape)))


def class_axis(logits: Any, axis: Any) -> int:
    """Return the axis of the classes, at least 0. Raise TypeError or ValueError if logits or axis are invalid."""
    check_dtype("logits", logits)
    shape = tuple(logits.shape)
    if not shape:
        raise ValueError("logits must have a class axis, got a 0-d array")
    place = check_int("axis", axis)
    if not -len(shape) <= place < len(shape):
        raise ValueError(f"axis must be in [{-len(shape)}, {len(shape) - 1}] for logits of shape {shape}, got {axis}")
    return place % len(shape)


def parts_of(weight: Any, name: str) -> dict[str, Any]:
    """Return the arrays of a classifier, by the names that error messages use. `name` is that of the argument."""
    if not isinstance(weight, QuantizedWeight):
        return {name: weight}
    parts = {part: getattr(weight, part) for part in ("packed", "scales", "biases")}
    for part in ("packed", "scales"):
        if parts[part] is None:
            raise TypeError(f"{name}.{part} must be an MLX array, got None")
    return {f"{name}.{part}": array for part, array in parts.items()}


def check_classifier(
    framework: str,
    input: Any,
    weight: Any,
    bias: Any,
    names: tuple[str, str, str] = ("input", "linear_weight", "linear_bias"),
) -> None:
    """Check hidden states and a classifier. `names` are those of the three arguments in error messages."""
    for name, array in zip(names, (input, weight, bias), strict=True):
        if isinstance(array, QuantizedWeight):
            _check_quantized(framework, array, name)
        elif array is not None:
            check_dtype(name, array)
    of_input, of_weight, of_bias = names
    if len(input.shape) < 1:
        raise ValueError(f"{of_input} must have shape (..., D), got a 0-d array")
    if len(weight.shape) != 2 or weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"{of_weight} must have shape (V, D) with D = {input.shape[-1]}, the last axis of {of_input} "
            f"{tuple(input.shape)}; got {tuple(weight.shape)}"
        )
    if bias is not None:
        check_shape(bias, (weight.shape[0],), f"{of_bias} must have shape {{}}, the rows of {of_weight}; got {{}}")


def _check_quantized(framework: str, weight: QuantizedWeight, name: str) -> None:
    """Raise TypeError or ValueError for an invalid quantized classifier."""
    if framework != "mlx":
        raise TypeError(f"{name}: a QuantizedWeight holds MLX arrays, got {describe(weight.packed)}")
    if dtype_name(weight.packed) != "uint32" or len(weight.packed.shape) != 2:
        raise TypeError(
            f"{name}.packed must be a uint32 array (V, D * bits / 32), as mlx.core.quantize returns it; got "
            f"{describe(weight.packed)}"
        )
    for number in ("group_size", "bits"):
        check_int(f"{name}.{number}", getattr(weight, number), "an int > 0,", 1)
    vocabulary, width = weight.shape
    groups = (vocabulary, width // weight.group_size)
    for kind in ("scales", "biases"):
        part = getattr(weight, kind)
        if part is not None and tuple(part.shape) != groups:
            raise ValueError(
                f"{name}.{kind} must have shape {groups}, one for each {weight.group_size} elements of a row of "
                f"({vocabulary}, {width}); got {tuple(part.shape)}"
            )


def check_weights(framework: str, sample_weight: Any, normalizer: Any, rows: tuple[int, ...], reduction: str) -> None:
    """Raise TypeError or ValueError for sample weights that do not fit rows of this shape, or an invalid normalizer."""
    if sample_weight is normalizer is None:
        return
    if sample_weight is not None:
        if dtype_name(sample_weight) not in (*FLOAT_DTYPES, *INTEGER_DTYPES, "bool", "bool_"):
            raise TypeError(f"sample_weight must hold real numbers or booleans, got {describe(sample_weight)}")
        check_shape(sample_weight, rows, "sample_weight must have shape {}, one per row; got {}")
    if normalizer is not None and reduction != "mean":
        raise ValueError(
            f"normalizer would be ignored with reduction={reduction!r}: pass reduction='mean', which divides the sum "
            "by it, or divide the result, loss / normalizer"
        )
    if normalizer is None or framework_of(normalizer) is None:
        check_numbers(framework, {"normalizer": normalizer})
    elif len(normalizer.shape) != 0:
        raise ValueError(f"normalizer must be a number or a 0-d array, got {describe(normalizer)}")
    elif dtype_name(normalizer) not in (*FLOAT_DTYPES, *INTEGER_DTYPES):
        raise TypeError(f"normalizer must be a real number or a 0-d array of one, got {describe(normalizer)}")


def check_sequence(shift: Any, input: Any) -> None:
    """Raise ValueError for a shift of hidden states (D,), which have no sequence axis."""
    if shift and len(input.shape) < 2:
        raise ValueError(f"shift={shift} needs a sequence axis: input of shape (..., T, D), got {tuple(input.shape)}")


def shards_of(framework: str, given: Any) -> Shards | None:
    """Return the validated description of shards, or None if the vocabulary is not in shards."""
    if given is None:
        return None
    if framework != "torch":
        raise TypeError(
            "vocab_parallel needs PyTorch tensors, which torch.distributed moves between processes, and got "
            f"{framework} arrays: pass the whole logits or classifier and no vocab_parallel, or torch tensors"
        )
    if isinstance(given, Shards):
        return given
    shards = given if isinstance(given, VocabParallel) else VocabParallel(given)
    for name, least in (("first", 0), ("size", 1)):
        value: Any = getattr(shards, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"vocab_parallel.{name} must be an int or None, got {describe(value)}")
        if not least <= int(value) < 2**31:
            raise ValueError(f"vocab_parallel.{name} must be in [{least}, 2^31), got {value}")
    sequence_parallel: Any = shards.sequence_parallel
    if not isinstance(sequence_parallel, bool):
        raise TypeError(f"vocab_parallel.sequence_parallel must be a bool, got {shown(sequence_parallel)}")
    first, size = (None if value is None else int(value) for value in (shards.first, shards.size))
    return Shards(shards.group, first, size, -2 if sequence_parallel else None)


def check_tokens(input: Any, target: Any, axis: int, heads: int | None) -> tuple[int, ...]:
    """Return the shape of the rows (..., T), which is the target's, for an `input` (..., T_r, D) split along `axis`.

    With heads, both the input and the result have a first axis of heads.
    """
    rows = tuple(target.shape)
    if dtype_name(target) in FLOAT_DTYPES:
        rows = rows[:-1]
    shape = tuple(input.shape)
    lead = 0 if heads is None else 1
    mine = shape[lead:-1]
    cut = axis % max(len(mine) + 1, 1)
    alike = len(mine) == len(rows) and all(mine[place] == rows[place] for place in range(len(mine)) if place != cut)
    if not mine or not alike or mine[cut] > rows[cut]:
        raise ValueError(
            f"with sequence_parallel, input must have shape (..., T_r, D) and target that of all tokens, (..., T); got "
            f"input {tuple(input.shape)} and target {tuple(target.shape)}"
        )
    return shape[:lead] + rows
