"""Validate arrays that several functions take: logits, classifiers, sample weights, normalizers.

Errors name the argument, its shape and dtype, and what is allowed.
"""

from typing import Any

from xent.core.arrays import FLOAT_DTYPES, INTEGER_DTYPES, describe, dtype_name, framework_of, shown
from xent.core.options import check_numbers, is_int
from xent.core.spec import QuantizedWeight

__all__ = [
    "check_classifier",
    "check_float",
    "check_normalizer",
    "check_sample_weight",
    "check_sequence",
    "class_axis",
    "parts_of",
]


def check_float(name: str, array: Any) -> None:
    """Raise TypeError for an array that holds no floating-point numbers."""
    if dtype_name(array) not in FLOAT_DTYPES:
        raise TypeError(f"{name} must have one of the dtypes {', '.join(FLOAT_DTYPES)}; got {describe(array)}")


def class_axis(logits: Any, axis: Any) -> int:
    """Return the axis of the classes, at least 0. Raise TypeError or ValueError if logits or axis are invalid."""
    check_float("logits", logits)
    shape = tuple(logits.shape)
    if not shape:
        raise ValueError("logits must have a class axis, got a 0-d array")
    if not is_int(axis):
        raise TypeError(f"axis must be an int, got {shown(axis)}")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis must be in [{-len(shape)}, {len(shape) - 1}] for logits of shape {shape}, got {axis}")
    return int(axis) % len(shape)


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
            check_float(name, array)
    of_input, of_weight, of_bias = names
    if len(input.shape) < 1:
        raise ValueError(f"{of_input} must have shape (..., D), got a 0-d array")
    if len(weight.shape) != 2 or weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"{of_weight} must have shape (V, D) with D = {input.shape[-1]}, the last axis of {of_input} "
            f"{tuple(input.shape)}; got {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"{of_bias} must have shape ({weight.shape[0]},), the rows of {of_weight}; got {tuple(bias.shape)}"
        )


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
        value = getattr(weight, number)
        if not is_int(value) or value <= 0:
            error = ValueError if is_int(value) else TypeError
            raise error(f"{name}.{number} must be an int > 0, got {shown(value)}")
    vocabulary, width = weight.shape
    groups = (vocabulary, width // weight.group_size)
    for kind in ("scales", "biases"):
        part = getattr(weight, kind)
        if part is not None and tuple(part.shape) != groups:
            raise ValueError(
                f"{name}.{kind} must have shape {groups}, one for each {weight.group_size} elements of a row of "
                f"({vocabulary}, {width}); got {tuple(part.shape)}"
            )


def check_sample_weight(sample_weight: Any, rows: tuple[int, ...]) -> Any:
    """Return the sample weights, or None. Raise TypeError or ValueError if they do not fit rows of this shape."""
    if sample_weight is None:
        return None
    if dtype_name(sample_weight) not in (*FLOAT_DTYPES, *INTEGER_DTYPES, "bool", "bool_"):
        raise TypeError(f"sample_weight must hold real numbers or booleans, got {describe(sample_weight)}")
    if tuple(sample_weight.shape) != rows:
        raise ValueError(f"sample_weight must have shape {rows}, one per row; got {tuple(sample_weight.shape)}")
    return sample_weight


def check_sequence(shift: Any, input: Any) -> None:
    """Raise ValueError for a shift of hidden states (D,), which have no sequence axis."""
    if shift and len(input.shape) < 2:
        raise ValueError(f"shift={shift} needs a sequence axis: input of shape (..., T, D), got {tuple(input.shape)}")


def check_normalizer(framework: str, normalizer: Any, reduction: str) -> Any:
    """Return the normalizer. Raise TypeError or ValueError if it is not None, a number >= 0, or a 0-d array."""
    if normalizer is None:
        return None
    if reduction != "mean":
        raise ValueError(
            f"normalizer would be ignored with reduction={reduction!r}: pass reduction='mean', which divides the sum "
            "by it, or divide the result, loss / normalizer"
        )
    if framework_of(normalizer) is not None:
        if len(normalizer.shape) != 0:
            raise ValueError(f"normalizer must be a number or a 0-d array, got {describe(normalizer)}")
        if dtype_name(normalizer) not in (*FLOAT_DTYPES, *INTEGER_DTYPES):
            raise TypeError(f"normalizer must be a real number or a 0-d array of one, got {describe(normalizer)}")
    else:
        check_numbers(framework, normalizer=normalizer)
    return normalizer
