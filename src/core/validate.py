"""Validate the arguments of the losses and describe the call. Errors name the argument, its value and what is allowed.

This module checks shapes and dtypes of arrays; `validate_options` checks numbers and names. The backends check the
values in `target` (see `XENT_CHECK_TARGETS` in `xent.cross_entropy`), because reading them may synchronise with the
device.
"""

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
from xent.core.spec import LinearCall, LogitsCall, QuantizedWeight
from xent.core.validate_options import check_numbers, check_shift_and_workspace, heads_of, is_int, loss_spec

__all__ = ["check_quantized", "linear_call", "logits_call", "parts_of"]


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
    if not is_int(axis):
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
        if not is_int(getattr(weight, number)) or getattr(weight, number) <= 0:
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
