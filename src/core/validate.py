"""Validate the arguments of the losses and describe the call. Errors name the argument, its value and what is allowed.

This module checks shapes, dtypes and numbers. The backends check the values in `target` (see `XENT_CHECK_TARGETS` in
`xent.cross_entropy`), because reading them may synchronise with the device.
"""

import math
import numbers
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
)
from xent.core.shards import check_tokens, shards_of
from xent.core.spec import REDUCTIONS, STAT_NAMES, Heads, LinearCall, LogitsCall, LossSpec, QuantizedWeight, bounded

__all__ = [
    "check_number",
    "check_numbers",
    "check_quantized",
    "check_shift_and_workspace",
    "check_stats",
    "heads_of",
    "linear_call",
    "logits_call",
    "loss_spec",
    "parts_of",
]


def logits_call(
    logits: Any,
    target: Any,
    *,
    weight: Any,
    sample_weight: Any,
    normalizer: Any,
    axis: int,
    inplace: bool,
    vocab_parallel: Any = None,
    **loss: Any,
) -> LogitsCall:
    """Check the arguments of `xent.cross_entropy` and describe the call."""
    normalizer = number_of(framework_of(logits), normalizer)
    framework = one_framework(
        logits=logits,
        target=target,
        weight=weight,
        sample_weight=sample_weight,
        normalizer=normalizer,
        **_scales(framework_of(logits), **loss),
    )
    spec = loss_spec(framework, **loss)
    _check_float("logits", logits)
    shape = tuple(logits.shape)
    if not shape:
        raise ValueError("logits must have a class axis, got a 0-d array")
    if not _is_int(axis):
        raise TypeError(f"axis must be an int, got {axis!r}")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis must be in [{-len(shape)}, {len(shape) - 1}] for logits of shape {shape}, got {axis}")
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace must be a bool, got {inplace!r}")
    axis %= len(shape)
    rows = shape[:axis] + shape[axis + 1 :]
    shards = shards_of(framework, vocab_parallel)
    if shards is not None and shards.axis is not None:
        raise ValueError(
            "sequence_parallel=True is for functions of hidden states, which they gather; logits must hold all tokens "
            "on every rank: leave sequence_parallel out, or pass hidden states to xent.linear_cross_entropy"
        )
    _check_rows("logits", shape, rows, shape[axis], shape, target, weight, sample_weight, shards is not None)
    normalizer = _normalizer(framework, normalizer, spec.reduction)
    return LogitsCall(logits, target, weight, sample_weight, normalizer, spec, axis, inplace, vocab_parallel=shards)


def linear_call(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any,
    weight: Any,
    sample_weight: Any,
    normalizer: Any,
    shift: Any,
    workspace: int | None,
    head_weight: Any = None,
    vocab_parallel: Any = None,
    **loss: Any,
) -> LinearCall:
    """Check the arguments of `xent.linear_cross_entropy` and describe the call."""
    normalizer = number_of(framework_of(input), normalizer)
    framework = one_framework(
        input=input,
        **parts_of(linear_weight, "linear_weight"),
        target=target,
        linear_bias=linear_bias,
        weight=weight,
        sample_weight=sample_weight,
        normalizer=normalizer,
        **_scales(framework_of(input), **loss),
    )
    spec = loss_spec(framework, **loss)
    for name, array in (("input", input), ("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if array is not None and not isinstance(array, QuantizedWeight):
            _check_float(name, array)
    if isinstance(linear_weight, QuantizedWeight):
        check_quantized(framework, linear_weight, "linear_weight")
    if len(input.shape) < 1:
        raise ValueError("input must have shape (..., D), got a 0-d array")
    if len(linear_weight.shape) != 2 or linear_weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"linear_weight must have shape (V, D) with D = {input.shape[-1]}, the last axis of input "
            f"{tuple(input.shape)}; got {tuple(linear_weight.shape)}"
        )
    vocabulary = linear_weight.shape[0]
    if linear_bias is not None and tuple(linear_bias.shape) != (vocabulary,):
        raise ValueError(
            f"linear_bias must have shape ({vocabulary},), the rows of linear_weight; got {tuple(linear_bias.shape)}"
        )
    check_shift_and_workspace(shift, workspace)
    shards = shards_of(framework, vocab_parallel)
    heads = heads_of(framework, shift, head_weight, spec.reduction)
    rows = tuple(input.shape[:-1])
    if shards is not None and shards.axis is not None:
        rows = check_tokens(input, target, shards.axis, None if heads is None else len(heads.shift))
    if heads is not None:
        count = len(heads.shift)
        if len(rows) < 2 or rows[0] != count:
            raise ValueError(
                f"shift={heads.shift} needs input of shape ({count}, ..., T, D), with the hidden states of each head; "
                f"got {tuple(input.shape)}"
            )
        rows, shift = rows[1:], 0
    elif shift and not rows:
        raise ValueError(f"shift={shift} needs a sequence axis: input of shape (..., T, D), got {tuple(input.shape)}")
    _check_rows(
        "input",
        tuple(input.shape),
        rows,
        vocabulary,
        (*rows, vocabulary),
        target,
        weight,
        sample_weight,
        shards is not None,
    )
    normalizer = _normalizer(framework, normalizer, spec.reduction)
    return LinearCall(
        input,
        linear_weight,
        linear_bias,
        target,
        weight,
        sample_weight,
        normalizer,
        spec,
        shift,
        workspace,
        heads=heads,
        vocab_parallel=shards,
    )


def _scales(framework: str | None, *, softcap: Any, logit_scale: Any, **_: Any) -> dict[str, Any]:
    """Return those of softcap and logit scale that are PyTorch tensors, by name."""
    given = {"softcap": number_of(framework, softcap), "logit_scale": number_of(framework, logit_scale)}
    return {name: value for name, value in given.items() if framework == "torch" == framework_of(value)}


def parts_of(weight: Any, name: str) -> dict[str, Any]:
    """Return the arrays of a classifier, by the names that error messages use. `name` is that of the argument."""
    if not isinstance(weight, QuantizedWeight):
        return {name: weight}
    parts = {part: getattr(weight, part) for part in ("packed", "scales", "biases")}
    for part in ("packed", "scales"):
        if parts[part] is None:
            raise TypeError(f"{name}.{part} must be an MLX array, got None")
    return {f"{name}.{part}": array for part, array in parts.items()}


def check_quantized(framework: str, weight: QuantizedWeight, name: str) -> None:
    """Raise TypeError or ValueError for an invalid quantized classifier."""
    if framework != "mlx":
        raise TypeError(f"{name}: a QuantizedWeight holds MLX arrays, got {describe(weight.packed)}")
    if dtype_name(weight.packed) != "uint32" or len(weight.packed.shape) != 2:
        raise TypeError(
            f"{name}.packed must be a uint32 array (V, D * bits / 32), as mlx.core.quantize returns it; got "
            f"{describe(weight.packed)}"
        )
    for number in ("group_size", "bits"):
        if not _is_int(getattr(weight, number)) or getattr(weight, number) <= 0:
            raise ValueError(f"{name}.{number} must be an int > 0, got {getattr(weight, number)!r}")
    vocabulary, width = weight.shape
    groups = (vocabulary, width // weight.group_size)
    for kind in ("scales", "biases"):
        part = getattr(weight, kind)
        if part is not None and tuple(part.shape) != groups:
            raise ValueError(
                f"{name}.{kind} must have shape {groups}, one for each {weight.group_size} elements of a row of "
                f"({vocabulary}, {width}); got {tuple(part.shape)}"
            )


def check_shift_and_workspace(shift: Any, workspace: int | None) -> None:
    """Raise ValueError for an invalid shift or workspace."""
    heads = shift if isinstance(shift, (tuple, list)) else (shift,)
    if not heads or not all(_is_int(one) and one >= 0 for one in heads):
        several = "" if heads and heads[0] is shift else ", or a tuple with one such int for each head"
        raise ValueError(f"shift must be an int >= 0{several}, got {shift!r}")
    if workspace is not None and (not _is_int(workspace) or workspace <= 0):
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


def check_stats(stats: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of statistics in the order of `allowed`. Raise TypeError or ValueError for other names."""
    listed = ", ".join(map(repr, allowed))
    if not isinstance(stats, (tuple, list, set, frozenset)):
        raise TypeError(f"stats must be a tuple, list or set of names from {listed}; got {stats!r}")
    unknown = [name for name in stats if name not in allowed]
    if unknown:
        raise ValueError(f"stats must be names from {listed}; got {unknown[0]!r}")
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
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    if not _is_int(ignore_index):
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


def _normalizer(framework: str, normalizer: Any, reduction: str) -> Any:
    if normalizer is not None and reduction != "mean":
        raise ValueError(
            f"normalizer would be ignored with reduction={reduction!r}: pass reduction='mean', which divides the sum "
            "by it, or divide the result, loss / normalizer"
        )
    if normalizer is None or framework_of(normalizer) is not None:
        if normalizer is not None and len(normalizer.shape) != 0:
            raise ValueError(f"normalizer must be a number or a 0-d array, got {describe(normalizer)}")
        if normalizer is not None and dtype_name(normalizer) not in (*FLOAT_DTYPES, *INTEGER_DTYPES):
            raise TypeError(f"normalizer must be a real number or a 0-d array of one, got {describe(normalizer)}")
        return normalizer
    if not is_tracing(framework):
        check_numbers(0.0, 0.0, None, 1.0, normalizer)
    return normalizer


def _check_rows(
    source: str,
    source_shape: tuple[int, ...],
    rows: tuple[int, ...],
    vocabulary: int,
    probabilities: tuple[int, ...],
    target: Any,
    weight: Any,
    sample_weight: Any,
    in_shards: bool,
) -> None:
    """Check arguments per row and per class against `rows`, the shape of index targets, and `vocabulary`.

    A shard of the vocabulary may be empty.
    """
    if vocabulary == 0 and not in_shards:
        raise ValueError(f"there must be at least one class, got 0 with {source} of shape {source_shape}")
    dtype, shape = dtype_name(target), tuple(target.shape)
    if dtype in INTEGER_DTYPES or (dtype == "uint64" and framework_of(target) == "numpy"):
        if shape != rows:
            other = source == "logits" and shape == source_shape[:1] + source_shape[2:]
            raise ValueError(
                f"target of class indices must have shape {rows} for {source} of shape {source_shape}, got {shape}"
                + ("; if the classes are on axis 1, pass axis=1" if other else "")
            )
    elif dtype in FLOAT_DTYPES:
        if shape != probabilities:
            raise ValueError(
                f"target of class probabilities (dtype {dtype}) must have shape {probabilities} for {source} of shape "
                f"{source_shape}, got {shape}; class indices need an integer dtype"
            )
    else:
        raise TypeError(
            f"target must hold class indices ({', '.join(INTEGER_DTYPES)}) or class probabilities "
            f"({', '.join(FLOAT_DTYPES)}), got dtype {dtype}"
        )
    if weight is not None:
        _check_float("weight", weight)
        if tuple(weight.shape) != (vocabulary,):
            raise ValueError(f"weight must have shape ({vocabulary},), one per class; got {tuple(weight.shape)}")
    if sample_weight is not None:
        if dtype_name(sample_weight) not in (*FLOAT_DTYPES, *INTEGER_DTYPES, "bool", "bool_"):
            raise TypeError(f"sample_weight must hold real numbers or booleans, got {describe(sample_weight)}")
        if tuple(sample_weight.shape) != rows:
            raise ValueError(f"sample_weight must have shape {rows}, one per row; got {tuple(sample_weight.shape)}")


def _check_float(name: str, array: Any) -> None:
    if dtype_name(array) not in FLOAT_DTYPES:
        raise TypeError(f"{name} must have one of the dtypes {', '.join(FLOAT_DTYPES)}; got {describe(array)}")


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
