"""Check options and values. Errors name the argument and what is allowed.

Values are checked on the CPU, as NumPy arrays: for NumPy calls, on PyTorch's CPU, and with XENT_CHECK_TARGETS=1.
"""

import math
import numbers
import operator
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xent.core.call import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    Shards,
    Source,
    TopK,
    describe,
    dtype_name,
    framework_of,
    shown,
    tolerance,
    vocabulary_of,
)
from xent.core.spec import DIVERGENCES, REDUCTIONS, STAT_NAMES, TAILS, Array, Scalar, VocabParallel, bounded

__all__ = [
    "PLAIN",
    "POSITIVE",
    "RANGES",
    "check_int",
    "check_options",
    "check_subset",
    "check_support",
    "check_targets",
    "check_temperature",
    "check_top_k",
    "invalid_top_k",
    "number_of",
    "outside",
    "repeats",
    "shards_of",
]

_Numpy = NDArray[Any]
_Scalars = tuple[Scalar, ...]

PLAIN = (int, float, type(None))
"""Types of numbers that are neither arrays nor NumPy's."""
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
POSITIVE = ("softcap", "temperature")
"""The options whose lower bound is not allowed."""
_NAMES = {"reduction": REDUCTIONS, "kind": DIVERGENCES, "teacher.tail": TAILS}
_FLAGS = ("inplace", "entropy", "vocab_parallel.sequence_parallel")
_REAL = {"torch": (*FLOAT_DTYPES, *INTEGER_DTYPES), "mlx": FLOAT_DTYPES}
"""The dtypes of 0-d arrays that may be numbers."""


def check_options(
    framework: str,
    arguments: Mapping[str, Any],
    arrays: bool = False,
    passed: Collection[str] | None = None,
    stats: tuple[str, ...] = STAT_NAMES,
) -> dict[str, Any]:
    """Return the options that change, after checking those `passed`, or all. Raise TypeError or ValueError.

    Numbers of NumPy become Python numbers, and a softcap is at most `LARGEST`. If `arrays`, a number may be a 0-d
    PyTorch tensor or MLX array, whose value is not read, and a temperature an array. `stats`: the statistics that the
    function returns.
    """
    checked: dict[str, Any] = {}
    passed = arguments if passed is None else passed
    for name in passed:
        value = arguments[name]
        if name in RANGES:
            checked[name] = _number(framework, name, value, arrays)
        elif name in _NAMES:
            if not isinstance(value, str) or value not in _NAMES[name]:
                error = ValueError if isinstance(value, str) else TypeError
                raise error(f"{name} must be one of {', '.join(map(repr, _NAMES[name]))}, got {shown(value)}")
        elif name in _FLAGS:
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be a bool, got {shown(value)}")
        elif name == "ignore_index":
            checked[name] = check_int(name, value)
            if not -(2**63) <= checked[name] < 2**63:
                raise ValueError(f"ignore_index must fit in 64 bits, got {value}")
        elif name == "workspace" and value is not None:
            checked[name] = check_int(name, value, "None or a positive int, a number of bytes;", 1)
        elif name == "shift":
            checked[name] = _shifts(value, "head_weight" in arguments)
        elif name == "stats":
            _check_stats(value, stats)
    reduction = arguments.get("reduction", "mean")
    if "head_weight" in passed and arguments["head_weight"] is not None:
        shift = checked.get("shift", arguments["shift"])
        checked["head_weight"] = _head_weights(framework, arguments["head_weight"], shift, reduction)
    if reduction != "mean" and checked.get("normalizer") is not None:
        raise ValueError(
            f"normalizer would be ignored with reduction={reduction!r}: pass reduction='mean', which divides the sum "
            "by it, or divide the result, loss / normalizer"
        )
    return checked


def _number(framework: str, name: str, value: object, arrays: bool) -> Scalar:
    """Return an option that must be a number in its range, or where allowed None or an array.

    While a compiler traces, tensors are not checked: numbers of NumPy are tensors then.
    """
    if value is None and name in ("softcap", "normalizer"):
        return None
    allowed, least, most = RANGES.get(name) or RANGES["logit_scale"]
    number = number_of(framework, value)
    other = ", or an array of floats" if arrays and name == "temperature" else ""
    if type(number) in PLAIN[:2] or _is_other_number(number):
        inside = least < number if name in POSITIVE else least <= number
        if not (inside and number <= most and -math.inf < number < math.inf):
            raise ValueError(f"{name} must be {allowed}{other}, got {number!r}")
        return bounded(number) if name == "softcap" else number
    is_own = framework_of(number) == framework
    if name == "normalizer" and is_own:
        if len(number.shape) != 0:
            raise ValueError(f"normalizer must be a number or a 0-d array, got {describe(number)}")
        if dtype_name(number) not in (*FLOAT_DTYPES, *INTEGER_DTYPES):
            raise TypeError(f"normalizer must be a real number or a 0-d array of one, got {describe(number)}")
    elif not (is_own and (other or (arrays and not number.shape and dtype_name(number) in _REAL.get(framework, ())))):
        if is_own and arrays and framework == "torch":
            raise TypeError(f"{name} must be a number or a 0-d tensor of one, got {describe(number)}")
        if not (is_own and _is_tracing(framework)):
            raise TypeError(f"{name} must be a number, {allowed}{other}; got {describe(number)}")
    return number


def number_of(framework: str | None, value: object) -> Scalar:
    """Convert a NumPy number or a 0-d NumPy array to a Python number; return anything else unchanged.

    Dynamo treats both as arrays of unknown value; while it traces, they become 0-d tensors.
    """
    if not isinstance(value, (np.generic, np.ndarray)) or value.ndim:
        return value
    if not _is_tracing(framework):
        return value.item() if value.dtype.kind in "fiu" else value
    import torch

    return torch.as_tensor(value)


def _is_tracing(framework: str | None) -> bool:
    """Whether a compiler is tracing this call. The values of numbers are then symbolic and must not be read."""
    if framework != "torch":
        return False
    import torch

    return torch.compiler.is_compiling()


def check_int(name: str, value: Any, allowed: str = "an int,", least: float = -math.inf, most: float = math.inf) -> int:
    """Return an integer of Python or NumPy as one of Python. Raise TypeError, or ValueError outside [least, most].

    One that torch.export traces becomes a constant.
    """
    if type(value).__name__ == "SymInt":
        value = operator.index(value)
    if not _is_int(value) or not least <= value <= most:
        raise (ValueError if _is_int(value) else TypeError)(f"{name} must be {allowed} got {shown(value)}")
    return value if isinstance(value, int) else int(value)  # one of Python may be symbolic, and is not converted


def _is_other_number(value: object) -> bool:
    """Return whether a value is a real number of another type, and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    """Return whether a value is an integer of Python or NumPy, and no boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_stats(stats: object, names: tuple[str, ...]) -> None:
    """Raise TypeError or ValueError for statistics that are not among these names."""
    listed = ", ".join(map(repr, names))
    if not isinstance(stats, (tuple, list, set, frozenset)):
        raise TypeError(f"stats must be a tuple, list or set of names from {listed}; got {shown(stats)}")
    for name in stats:
        if name not in names:
            more = ": pass entropy=True" if name == "entropy" else ""
            raise ValueError(f"stats must be names from {listed}; got {shown(name)}{more}")


def _shifts(shift: object, has_heads: bool) -> int | tuple[int, ...]:
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
    return tuple(check_int("shift", entry) for entry in shift)


def _head_weights(framework: str, head_weight: object, shift: int | tuple[int, ...], reduction: str) -> _Scalars:
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
    return tuple(_number(framework, f"head_weight[{head}]", weight, False) for head, weight in enumerate(head_weight))


def shards_of(framework: str, vocab_parallel: object) -> Shards:
    """Return the validated description of shards."""
    if framework != "torch":
        raise TypeError(
            "vocab_parallel needs PyTorch tensors, which torch.distributed moves between processes, and got "
            f"{framework} arrays: pass the whole logits or classifier and no vocab_parallel, or torch tensors"
        )
    if isinstance(vocab_parallel, Shards):
        return vocab_parallel
    shards = vocab_parallel if isinstance(vocab_parallel, VocabParallel) else VocabParallel(vocab_parallel)
    ranges: dict[str, int | None] = {}
    for name, least in (("first", 0), ("size", 1)):
        value = getattr(shards, name)
        if value is not None:
            value = check_int(f"vocab_parallel.{name}", value, "an int or None,")
            if not least <= value < 2**31:
                raise ValueError(f"vocab_parallel.{name} must be in [{least}, 2^31), got {value}")
        ranges[name] = value
    check_options(framework, {_FLAGS[-1]: shards.sequence_parallel})
    return Shards(shards.group, ranges["first"], ranges["size"], -2 if shards.sequence_parallel else None)


def check_targets(ids: _Numpy, vocabulary: int, ignore_index: int, shift: int) -> None:
    """Raise IndexError for the first invalid target. Rows do not use the first `shift` ones of the last axis."""
    place = _first(outside(ids, vocabulary) & (ids != ignore_index), shift)
    if place is not None:
        raise IndexError(
            f"target{place or ''} is {ids[tuple(place)]}; classes are 0 to {vocabulary - 1}, or "
            f"ignore_index={ignore_index}"
        )


def check_temperature(temperature: _Numpy, ids: _Numpy, ignore_index: int, shift: int) -> None:
    """Raise ValueError for the first temperature that is not > 0, of a row that has a target.

    `temperature` is that of each target in `ids`, or 0-d.
    """
    place = _first(~(temperature > 0) & (ids != ignore_index), shift)
    if place is not None:
        invalid = np.broadcast_to(temperature, ids.shape)[tuple(place)]
        raise ValueError(f"temperature must be > 0 in every row, got {invalid} at {place or 'its row'}")


def check_support(classes: _Numpy, begin: _Numpy, end: _Numpy, vocabulary: int) -> None:
    """Raise ValueError if offsets do not increase from 0 to the number of ids, IndexError for the first invalid id."""
    sizes = end - begin
    first, last = (begin[0], end[-1]) if len(begin) else (0, 0)
    if first != 0 or (sizes < 0).any() or last != len(classes):
        raise ValueError(
            f"support.offsets must be non-decreasing from 0 to {len(classes)}, the number of ids; got {first} to {last}"
            + (" and a decrease between" if (sizes < 0).any() else "")
        )
    place = _first(outside(classes, vocabulary), 0)
    if place is not None:
        raise IndexError(f"support.ids{place} is {classes[place[0]]}; classes are 0 to {vocabulary - 1}")
    entries, counts = np.unique(np.repeat(np.arange(len(sizes)), sizes) * vocabulary + classes, return_counts=True)
    if (counts > 1).any():
        row, again = divmod(int(entries[counts > 1][0]), vocabulary)
        raise ValueError(f"support.ids must hold a class at most once in a row; row {row} has {again} more than once")


def check_subset(ids: _Numpy, source: Source) -> None:
    """Raise IndexError or ValueError for ids that are no classes of the teacher or repeat."""
    size = vocabulary_of(source)
    place = _first(outside(ids, size), 0)
    if place is not None:
        raise IndexError(f"teacher.ids{place} is {ids[place[0]]}; the teacher's classes are 0 to {size - 1}")
    ordered = np.sort(ids)
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    if again.size:
        raise ValueError(f"teacher.ids of a xent.Subset must hold a class at most once, got {ordered[again[0]]} again")


def check_top_k(ids: _Numpy, log_probs: _Numpy, used: _Numpy, teacher: TopK, vocabulary: int) -> None:
    """Raise for the first invalid row of a top-k teacher that is `used` (...)."""
    padding = log_probs == -np.inf
    wrong = outside(ids, vocabulary) & ~padding
    classes = np.where(padding, -1 - np.arange(ids.shape[-1]), np.where(wrong, vocabulary, ids))
    ordered, mass = np.sort(classes, -1), np.exp(log_probs).sum(-1)
    place = _first(invalid_top_k(ordered, mass, teacher, vocabulary) & np.asarray(used, bool), 0)
    if place is None:
        return
    row, name = tuple(place), f"of row {place}"
    if wrong[row].any():
        raise IndexError(f"teacher.ids {name} holds {ids[row][wrong[row]][0]}; classes are 0 to {vocabulary - 1}")
    if repeats(ordered[row]):
        raise ValueError(f"teacher.ids {name} holds a class more than once")
    if mass[row] == 0:
        raise ValueError(f"teacher.log_probs {name} have no mass that could be renormalised")
    raise ValueError(f"teacher.log_probs {name} have a mass of {mass[row]:.6g}, more than 1 by more than rounding")


def outside(ids: Array, size: int) -> Array:
    """Return which ids are no classes. This and the next two functions take arrays of every framework."""
    return (ids < 0) | (ids >= size)


def repeats(ordered: Array) -> Array:
    """Return whether sorted ids (..., K) hold one more than once, (...)."""
    return (ordered[..., 1:] == ordered[..., :-1]).any(-1)


def invalid_top_k(ordered: Array, mass: Array, teacher: TopK, vocabulary: int) -> Array:
    """Return which rows (...) of a top-k teacher are invalid, whose probabilities have the sums `mass` (...).

    `ordered` (..., K) are the sorted ids, V in place of one that is no class, and distinct negative numbers as padding.
    """
    wrong = (ordered[..., -1] == vocabulary) | repeats(ordered) | ~(mass <= 1 + tolerance(teacher))
    return wrong | (mass == 0) if teacher.tail == "renormalize" else wrong


def _first(wrong: _Numpy, shift: int) -> list[int] | None:
    """Return the position of the first True, without the first `shift` entries of the last axis."""
    if shift:
        wrong[..., :shift] = False
    return [int(index) for index in np.argwhere(wrong)[0]] if wrong.any() else None
