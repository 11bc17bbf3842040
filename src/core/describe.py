"""Validate the arguments of a public function and describe the call. Errors name the argument and what is allowed.

Backends check the values in a target, a support or a top-k teacher (see `XENT_CHECK_TARGETS` in `xent.cross_entropy`),
because reading them may synchronise with the device.
"""

import math
from collections.abc import Collection
from typing import Any

from xent.core.arrays import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    PLAIN,
    describe,
    dtype_name,
    framework_of,
    number_of,
    one_framework,
    shape_of,
    wide,
)
from xent.core.call import (
    Activation,
    Allowed,
    Call,
    Classes,
    Dense,
    Given,
    Options,
    Probabilities,
    Product,
    Source,
    Target,
    TopK,
    gathered,
    vocabulary_of,
)
from xent.core.spec import LinearTeacher, QuantizedWeight, Subset, Support, TopKTeacher, bounded
from xent.core.validate import (
    RANGES,
    check_classifier,
    check_dtype,
    check_int,
    check_options,
    check_shape,
    shards_of,
)
from xent.core.values import check_subset

__all__ = ["NO_SUBSET", "described"]

NO_SUBSET = (
    "a xent.Subset does not go with vocab_parallel, because the classes that it selects are on other ranks: pass the "
    "whole classifiers, or a teacher of the student's classes that is cut like the student"
)
_ARRAYS = (
    "logits",
    "input",
    "linear_weight",
    "target",
    "teacher",
    "linear_bias",
    "weight",
    "sample_weight",
    "support",
)
_PARTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (QuantizedWeight, ("packed", "scales", "biases")),
    (LinearTeacher, ("input", "weight", "bias")),
    (TopKTeacher, ("ids", "log_probs")),
    (Support, ("ids", "offsets")),
)
"""The arrays of arguments that hold several."""


def described(arguments: dict[str, Any], passed: Collection[str]) -> Call:
    """Check the arguments of a public function, by their names, and describe the call.

    The arguments that are not among those `passed` have valid values. Log-probabilities are described as a loss with
    reduction "none", not negated, with float32 logits.
    """
    given = {"reduction": "none", "inplace": False, "shift": 0, "support": None, **arguments}
    is_linear, is_divergence, of_rows = "input" in given, "teacher" in given, "entropy" in given
    name = "input" if is_linear else "logits"
    array = given[name]
    if is_divergence:
        _check_teacher(given["teacher"])
    elif given["support"] is not None and not isinstance(given["support"], Support):
        raise TypeError(f"support must be a xent.Support or None, got {describe(given['support'])}")
    arrays = _arrays_of({one: given[one] for one in _ARRAYS if one in passed})
    for one in RANGES:
        if one in passed and type(given[one]) not in PLAIN:
            given[one] = number = number_of(framework_of(array), given[one])
            if framework_of(number) is not None and (one == "normalizer" or not is_divergence):
                arrays[one] = number
    framework = one_framework(arrays)
    given |= check_options(framework, given, not is_divergence, passed)
    shift, shards = given["shift"], shards_of(framework, given["vocab_parallel"])
    if shards is not None and shards.axis is not None and (is_divergence or not is_linear):
        raise ValueError(
            "sequence_parallel=True is for xent.linear_cross_entropy and xent.linear_log_probs: gather the hidden "
            "states of student and teacher, and leave sequence_parallel out"
            if is_divergence
            else "sequence_parallel=True is for functions of hidden states, which they gather; logits must hold all "
            "tokens on every rank: leave sequence_parallel out, or pass hidden states to xent.linear_cross_entropy"
        )
    heads = len(shift) if isinstance(shift, tuple) else None
    if is_linear:
        weight, bias = given["linear_weight"], given["linear_bias"]
        check_classifier(framework, "input", array, "linear_weight", weight, bias)
        source: Source = Product(array, weight, bias, given["workspace"])
        rows = tuple(array.shape[:-1])
        if shards is not None and shards.axis is not None:
            # This rank has a part of the tokens, along that axis; the target has all. Heads are on the first axis.
            lead, target_shape = 0 if heads is None else 1, tuple(given["target"].shape)
            mine = rows[lead:]
            every = target_shape[:-1] if dtype_name(given["target"]) in FLOAT_DTYPES else target_shape
            cut = shards.axis % (len(mine) + 1)
            alike = mine[:cut] + mine[cut + 1 :] == every[:cut] + every[cut + 1 :]
            if not mine or len(mine) != len(every) or not alike or mine[cut] > every[cut]:
                raise ValueError(
                    "with sequence_parallel, input must have shape (..., T_r, D) and target that of all tokens, "
                    f"(..., T); got input {tuple(array.shape)} and target {target_shape}"
                )
            rows = rows[:lead] + every
        if heads is not None:
            if len(rows) < 2 or rows[0] != heads:
                raise ValueError(
                    f"shift={shift} needs input of shape ({heads}, ..., T, D), with the hidden states of each head; "
                    f"got {tuple(array.shape)}"
                )
            rows = rows[1:]
        elif shift and len(array.shape) < 2:
            raise ValueError(
                f"shift={shift} needs a sequence axis: input of shape (..., T, D), got {tuple(array.shape)}"
            )
        axis = len(rows)
    else:
        check_dtype("logits", array)
        count, axis = len(array.shape), given["axis"]
        if not count:
            raise ValueError("logits must have a class axis, got a 0-d array")
        if not -count <= check_int("axis", axis) < count:
            raise ValueError(
                f"axis must be in [{-count}, {count - 1}] for logits of shape {tuple(array.shape)}, got {axis}"
            )
        axis = int(axis % count)
        source, rows = Given(array, axis, given["inplace"]), tuple(array.shape[:axis] + array.shape[axis + 1 :])
    vocabulary = vocabulary_of(source)
    if vocabulary == 0 and shards is None:
        raise ValueError(f"there must be at least one class, got 0 with {name} of shape {tuple(array.shape)}")
    if is_divergence:
        if shards is not None and isinstance(given["teacher"], Subset):
            raise ValueError(NO_SUBSET)
        target = _teacher(framework, given, rows, vocabulary, axis, shards is not None)
    else:
        target = _target(framework, given, source, rows, (*rows[:axis], vocabulary, *rows[axis:]))
    class_weight, sample_weight = given.get("weight"), given.get("sample_weight")
    if class_weight is not None:
        check_dtype("weight", class_weight)
        check_shape(class_weight, (vocabulary,), "weight must have shape {}, one per class; got {}")
    if sample_weight is not None:
        if dtype_name(sample_weight) not in (*FLOAT_DTYPES, *INTEGER_DTYPES, "bool", "bool_"):
            raise TypeError(f"sample_weight must hold real numbers or booleans, got {describe(sample_weight)}")
        check_shape(sample_weight, rows, "sample_weight must have shape {}, one per row; got {}")
    named = {one: given[one] for one in Options._fields if one in given}
    options = Options(**named, exact=of_rows, accuracy_of_rows=of_rows, heads=heads)
    activation = _activation(framework, given, given.get("temperature"), rows)
    return Call(source, target, activation, options, shards)


def _check_teacher(teacher: Any) -> None:
    """Raise TypeError or ValueError for a value that is no teacher."""
    whole = teacher.teacher if isinstance(teacher, Subset) else teacher
    if isinstance(whole, LinearTeacher) or framework_of(whole) is not None:
        return
    if whole is not teacher and isinstance(whole, TopKTeacher):
        raise ValueError(
            "a xent.Subset of a TopKTeacher is not possible: the teacher's probabilities of the student's classes "
            "that were not stored are unknown. Pass logits or a LinearTeacher, or store the K classes of the student's "
            "vocabulary"
        )
    if whole is not teacher:
        raise TypeError(
            f"the teacher of a xent.Subset must be an array of logits or a xent.LinearTeacher, got {describe(whole)}"
        )
    if not isinstance(whole, TopKTeacher):
        raise TypeError(
            "teacher must be an array of logits, a xent.LinearTeacher, a xent.TopKTeacher or a xent.Subset, got "
            f"{describe(whole)}"
        )


def _arrays_of(named: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of arguments, by the names that error messages use."""
    found: dict[str, Any] = {}
    for name, value in named.items():
        parts = [part for kind, some in _PARTS if isinstance(value, kind) for part in some]
        if isinstance(value, Subset):
            found |= _arrays_of({name: value.teacher, f"{name}.ids": value.ids})
        elif parts:
            found |= _arrays_of({f"{name}.{part}": getattr(value, part) for part in parts})
        elif value is None and name.endswith((".packed", ".scales")):
            raise TypeError(f"{name} must be an MLX array, got None")
        elif name.startswith("support.") and framework_of(value) is None:
            raise TypeError(f"{name} must be a 1-d integer array, got {describe(value)}")
        else:
            found[name] = value
    return found


def _target(
    framework: str, given: dict[str, Any], source: Source, rows: tuple[int, ...], probabilities: tuple[int, ...]
) -> Target:
    """Check and describe the target. `rows` and `probabilities` are the shapes of class indices and probabilities."""
    target, support, of_rows = given["target"], given["support"], "entropy" in given
    dtype, found = dtype_name(target), tuple(target.shape)
    name = "logits" if isinstance(source, Given) else "input"
    shape = tuple(given[name].shape)
    if dtype in FLOAT_DTYPES and not of_rows:
        check_shape(
            target,
            probabilities,
            f"target of class probabilities (dtype {dtype}) must have shape {{}} for {name} of shape {shape}, got "
            "{}; class indices need an integer dtype",
        )
        return Probabilities(target)
    if dtype not in INTEGER_DTYPES and not (dtype == "uint64" and framework == "numpy"):
        other = "" if of_rows else f" or class probabilities ({', '.join(FLOAT_DTYPES)})"
        raise TypeError(f"target must hold class indices ({', '.join(INTEGER_DTYPES)}){other}, got dtype {dtype}")
    if found != rows:
        first = isinstance(source, Given) and found == shape[:1] + shape[2:]
        raise ValueError(
            f"target of class indices must have shape {rows} for {name} of shape {shape}, got {found}"
            + ("; if the classes are on axis 1, pass axis=1" if first else "")
        )
    if support is None:
        return Classes(target)
    for part in ("ids", "offsets"):
        values = getattr(support, part)
        if dtype_name(values) not in INTEGER_DTYPES or len(values.shape) != 1:
            raise TypeError(f"support.{part} must be a 1-d integer array, got {describe(values)}")
    offsets, wanted = support.offsets, math.prod(rows) + 1
    if offsets.shape[0] != wanted:
        raise ValueError(
            f"support.offsets must have {wanted} entries, one more than there are rows of target; got "
            f"{offsets.shape[0]}"
        )
    return Allowed(target, support.ids, offsets[:-1], offsets[1:])


def _teacher(
    framework: str, given: dict[str, Any], rows: tuple[int, ...], vocabulary: int, axis: int, in_shards: bool
) -> Target:
    """Check and describe the teacher of a student with these rows, and classes on `axis`."""
    teacher, kind, beta = given["teacher"], given["kind"], given["beta"]
    has_beta = framework_of(beta) is None and beta != 0
    if kind != "kl" and has_beta:
        raise ValueError(f"beta must be 0 with kind='tv', got {beta!r}: it selects one of kind='kl'")
    if isinstance(teacher, TopKTeacher):
        check_options(framework, {"teacher.tail": teacher.tail})
        check_dtype("teacher.ids", teacher.ids, INTEGER_DTYPES)
        check_dtype("teacher.log_probs", teacher.log_probs)
        shape, most = tuple(teacher.ids.shape), 2**31 if in_shards else vocabulary
        if shape[:-1] != rows or len(shape) != len(rows) + 1:
            raise ValueError(f"teacher.ids must have shape {shape_of(*rows, 'K')}, K classes for each row; got {shape}")
        if not 1 <= shape[-1] <= most:
            raise ValueError(f"teacher.ids must hold 1 to {most} classes a row, the vocabulary; got {shape[-1]}")
        check_shape(teacher.log_probs, shape, "teacher.log_probs must have the shape of teacher.ids, {}; got {}")
        if has_beta:
            raise ValueError(
                f"beta must be 0 with a TopKTeacher, got {beta!r}: KL(p || q) and mixtures need the teacher's "
                "probability of every class that the student gives mass to, and a top-k teacher has K of them. Pass "
                "logits or a LinearTeacher"
            )
        if kind == "tv" and teacher.tail == "drop":
            raise ValueError(
                "teacher.tail must be 'bucket' or 'renormalize' with kind='tv', got 'drop': without the mass that is "
                "left, the distance would not be one of distributions"
            )
        return TopK(teacher.ids, teacher.log_probs, teacher.tail)
    ids = None
    if isinstance(teacher, Subset):
        ids, teacher = teacher.ids, teacher.teacher
        check_dtype("teacher.ids", ids, INTEGER_DTYPES)
        check_shape(
            ids,
            (vocabulary,),
            "teacher.ids of a xent.Subset must have shape {}, the teacher's class of each class of the student; got {}",
        )
    alike = "; with vocab_parallel student and teacher must be cut alike" if in_shards else ""
    numbers: dict[str, Any] = {"softcap": None, "logit_scale": 1.0}
    source: Source
    if isinstance(teacher, LinearTeacher):
        check_classifier(framework, "teacher.input", teacher.input, "teacher.weight", teacher.weight, teacher.bias)
        if ids is None and teacher.weight.shape[0] != vocabulary:
            raise ValueError(
                f"teacher.weight must have {vocabulary} rows, the student's vocabulary, got {teacher.weight.shape[0]}: "
                f"a divergence compares distributions over the same classes{alike}"
            )
        if tuple(teacher.input.shape[:-1]) != rows:
            raise ValueError(
                f"teacher.input must have shape {shape_of(*rows, 'D')}, a hidden state for each row of the student; "
                f"got {tuple(teacher.input.shape)}"
            )
        numbers = check_options(framework, {"softcap": teacher.softcap, "logit_scale": teacher.logit_scale})
        source = Product(teacher.input, teacher.weight, teacher.bias)
    else:
        check_dtype("teacher", teacher)
        found = tuple(teacher.shape)
        size = vocabulary if ids is None else found[axis] if len(found) > axis else "V"
        if found != (*rows[:axis], size, *rows[axis:]):
            expected = shape_of(*rows[:axis], vocabulary if ids is None else "V", *rows[axis:])
            raise ValueError(
                f"teacher must have shape {expected}, the student's rows and vocabulary; got {found}{alike}"
            )
        source = Given(teacher, axis)
    if framework == "numpy" and ids is not None:
        check_subset(ids, source)
        ids, source = None, gathered(source, ids)
    return Dense(source, _activation(framework, numbers, given["temperature"], rows), ids)


def _activation(framework: str, given: dict[str, Any], temperature: Any, rows: tuple[int, ...]) -> Activation:
    """Return scale and softcap with the temperature: None, a number, or in a log-probability function an array.

    A number T is folded into them, and no 16-bit dtype rounds the quotients: x = k tanh(s z / k) / T =
    k' tanh(s' z / k') with k' = k / T and s' = s / T. A 0-d tensor or MLX array is treated as a temperature per row:
    its value may be invalid, and may not be known yet.
    """
    scale, cap = given["logit_scale"], given["softcap"]
    if temperature is None:
        return Activation(scale, cap)
    heat = bounded(temperature)
    if framework_of(heat) is not None and "entropy" in given:
        if dtype_name(heat) not in FLOAT_DTYPES:
            raise TypeError(f"temperature must be a number, or an array of floats; got {describe(heat)}")
        if framework == "torch" and not heat.shape:
            heat = heat.expand(rows)
        if tuple(heat.shape) not in ((rows, ()) if framework == "mlx" else (rows,)):
            raise ValueError(
                f"temperature must be a number or have the target's shape {rows}, one for each row; got "
                f"{tuple(heat.shape)}"
            )
        return Activation(scale, cap, heat)
    if framework_of(heat) == "torch":  # while a compiler traces
        heat = heat.where(heat > 0, math.nan)
    return Activation(wide(scale) / heat, None if cap is None else wide(cap) / heat)
