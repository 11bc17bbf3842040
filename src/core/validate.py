"""Check the options of a call, and arrays that several functions take. Errors name the argument and what is allowed."""

import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from xent.core.arrays import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    describe,
    dtype_name,
    framework_of,
    is_tracing,
    number_of,
    shown,
)
from xent.core.call import Shards
from xent.core.spec import (
    DIVERGENCE_STATS,
    DIVERGENCES,
    LOG_PROB_STATS,
    REDUCTIONS,
    STAT_NAMES,
    TAILS,
    QuantizedWeight,
    VocabParallel,
    bounded,
)

__all__ = ["RANGES", "check_classifier", "check_dtype", "check_int", "check_options", "check_shape", "shards_of"]

RANGES = {
    "label_smoothing": ("in [0, 1]", 0, 1),
    "z_loss": ("finite and >= 0", 0, math.inf),
    "softcap": ("finite and > 0, or None", 0, math.inf),
    "logit_scale": ("finite", -math.inf, math.inf),
    "normalizer": ("finite and >= 0", 0, math.inf),
    "beta": ("in [0, 1]", 0, 1),
    "temperature": ("finite and > 0", 0, math.inf),
}
"""The options that are numbers: what is allowed, and the bounds."""
_POSITIVE = ("softcap", "temperature")
"""The options whose lower bound is not allowed."""
_NAMES = {"reduction": REDUCTIONS, "kind": DIVERGENCES, "teacher.tail": TAILS}
_FLAGS = ("inplace", "entropy", "vocab_parallel.sequence_parallel")
_REAL = {"torch": (*FLOAT_DTYPES, *INTEGER_DTYPES), "mlx": FLOAT_DTYPES}
"""The dtypes of 0-d arrays that may be numbers."""


def check_options(
    framework: str, given: Mapping[str, Any], arrays: bool = False, passed: Collection[str] | None = None
) -> dict[str, Any]:
    """Return arguments by name, those `passed` or all, after checking the options. Raise TypeError or ValueError.

    Numbers of NumPy become Python numbers, a softcap is at most `LARGEST`, and statistics have the order of
    `STAT_NAMES`. If `arrays`, a number may be a 0-d PyTorch tensor or MLX array, whose value is not read, and a
    temperature an array.
    """
    named = {name: given[name] for name in (given if passed is None else passed)}
    made = named | _numbers(framework, {name: value for name, value in named.items() if name in RANGES}, arrays)
    for name, value in named.items():
        if name in _NAMES and (not isinstance(value, str) or value not in _NAMES[name]):
            error = ValueError if isinstance(value, str) else TypeError
            raise error(f"{name} must be one of {', '.join(map(repr, _NAMES[name]))}, got {shown(value)}")
        elif name in _FLAGS and not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {shown(value)}")
    if "stats" in named or "entropy" in named:
        made["stats"] = _stats(given)
    if "ignore_index" in named:
        made["ignore_index"] = ignore_index = check_int("ignore_index", given["ignore_index"])
        if not -(2**63) <= ignore_index < 2**63:
            raise ValueError(f"ignore_index must fit in 64 bits, got {ignore_index}")
    if named.get("workspace") is not None:
        allowed = "None or a positive int, a number of bytes;"
        made["workspace"] = check_int("workspace", given["workspace"], allowed, 1)
    if "shift" in named:
        made["shift"] = _shifts(given["shift"], "head_weight" in given)
    if named.get("head_weight") is not None:
        shift = made.get("shift", given["shift"])
        made["head_weight"] = _head_weights(framework, given["head_weight"], shift, given["reduction"])
    reduction = given.get("reduction", "mean")
    if reduction != "mean" and named.get("normalizer") is not None:
        raise ValueError(
            f"normalizer would be ignored with reduction={reduction!r}: pass reduction='mean', which divides the sum "
            "by it, or divide the result, loss / normalizer"
        )
    return made


def _numbers(framework: str, given: Mapping[str, Any], arrays: bool) -> dict[str, Any]:
    """Return the options that must be numbers in their range, or where allowed None or an array.

    While a compiler traces, tensors are not checked: numbers of NumPy are tensors then.
    """
    made: dict[str, Any] = {}
    for name, value in given.items():
        allowed, least, most = RANGES.get(name) or RANGES["logit_scale"]
        made[name] = number = number_of(framework, value)
        if value is None and name in ("softcap", "normalizer"):
            continue
        other = ", or an array of floats" if arrays and name == "temperature" else ""
        if _is_number(number):
            inside = least < number if name in _POSITIVE else least <= number
            if not (inside and number <= most and -math.inf < number < math.inf):
                raise ValueError(f"{name} must be {allowed}{other}, got {number!r}")
            made[name] = bounded(number) if name == "softcap" else number
            continue
        is_own = framework_of(number) == framework
        if name == "normalizer" and is_own:
            if len(number.shape) != 0:
                raise ValueError(f"normalizer must be a number or a 0-d array, got {describe(number)}")
            if dtype_name(number) not in (*FLOAT_DTYPES, *INTEGER_DTYPES):
                raise TypeError(f"normalizer must be a real number or a 0-d array of one, got {describe(number)}")
            continue
        if is_own and (other or (arrays and not number.shape and dtype_name(number) in _REAL.get(framework, ()))):
            continue
        if is_own and arrays and framework == "torch":
            raise TypeError(f"{name} must be a number or a 0-d tensor of one, got {describe(number)}")
        if not (is_own and is_tracing(framework)):
            raise TypeError(f"{name} must be a number, {allowed}{other}; got {describe(number)}")
    return made


def check_int(name: str, value: Any, allowed: str = "an int,", least: int | None = None) -> int:
    """Return an integer of Python or NumPy as one of Python. Raise TypeError, or ValueError if it is below `least`."""
    if not _is_int(value) or (least is not None and value < least):
        raise (ValueError if _is_int(value) else TypeError)(f"{name} must be {allowed} got {shown(value)}")
    return value if isinstance(value, int) else int(value)  # one of Python may be symbolic, and is not converted


def _is_number(value: Any) -> bool:
    """Return whether a value is a real number of Python, and no boolean."""
    return type(value) in (int, float) or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _is_int(value: Any) -> bool:
    """Return whether a value is an integer of Python or NumPy, and no boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _stats(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the statistics to compute, with the entropy of a log-probability function."""
    stats = given["stats"]
    names = LOG_PROB_STATS if "entropy" in given else DIVERGENCE_STATS if "teacher" in given else STAT_NAMES
    listed = ", ".join(map(repr, names))
    if not isinstance(stats, (tuple, list, set, frozenset)):
        raise TypeError(f"stats must be a tuple, list or set of names from {listed}; got {shown(stats)}")
    for name in stats:
        if name not in names:
            more = ": pass entropy=True" if name == "entropy" else ""
            raise ValueError(f"stats must be names from {listed}; got {shown(name)}{more}")
    return tuple(name for name in STAT_NAMES if name in stats or (name == "entropy" and given.get(name)))


def _shifts(shift: Any, has_heads: bool) -> int | tuple[int, ...]:
    """Return a shift as a Python int; if the function has heads, it may be a tuple with one for each."""
    if not isinstance(shift, (tuple, list)):
        return check_int("shift", shift, "an int >= 0,", 0)
    if not has_heads:
        raise ValueError(
            f"shift must be an int >= 0, since only xent.linear_cross_entropy takes a tuple for several heads; got "
            f"{shown(shift)}"
        )
    integers = all(map(_is_int, shift))
    if not shift or not integers or min(shift) < 0:
        raise (ValueError if integers else TypeError)(
            f"shift must be an int >= 0, or a tuple with one such int for each head, got {shown(shift)}"
        )
    return tuple(check_int("shift", one) for one in shift)


def _head_weights(framework: str, head_weight: Any, shift: int | tuple[int, ...], reduction: str) -> tuple[Any, ...]:
    """Return the weights of the heads that a checked `shift` names. Raise if they do not fit."""
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
    named = {f"head_weight[{head}]": one for head, one in enumerate(head_weight)}
    return tuple(_numbers(framework, named, False).values())


def check_dtype(name: str, array: Any, allowed: tuple[str, ...] = FLOAT_DTYPES) -> None:
    """Raise TypeError for an array of another dtype."""
    if dtype_name(array) not in allowed:
        dtypes = f"must have one of the dtypes {', '.join(allowed)};"
        raise TypeError(
            f"{name} {'must have an integer dtype,' if 'int64' in allowed else dtypes} got {describe(array)}"
        )


def check_shape(array: Any, shape: tuple[Any, ...], message: str) -> None:
    """Raise ValueError for an array of another shape. `message` has two places, for the right and for its shape."""
    if tuple(array.shape) != shape:
        raise ValueError(message.format(shape, tuple(array.shape)))


def check_classifier(framework: str, of_input: str, input: Any, of_weight: str, weight: Any, bias: Any) -> None:
    """Check hidden states and a classifier. `of_input` and `of_weight` are their names in error messages."""
    of_bias = of_weight.replace("weight", "bias")
    for name, array in ((of_input, input), (of_weight, weight), (of_bias, bias)):
        if isinstance(array, QuantizedWeight):
            _check_quantized(framework, array, name)
        elif array is not None:
            check_dtype(name, array)
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
    found: dict[str, Any] = {}
    for name, least in (("first", 0), ("size", 1)):
        value = getattr(shards, name)
        if value is not None:
            value = check_int(f"vocab_parallel.{name}", value, "an int or None,")
            if not least <= value < 2**31:
                raise ValueError(f"vocab_parallel.{name} must be in [{least}, 2^31), got {value}")
        found[name] = value
    check_options(framework, {_FLAGS[-1]: shards.sequence_parallel})
    return Shards(shards.group, **found, axis=-2 if shards.sequence_parallel else None)
