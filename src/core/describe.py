"""Describe a call of a public function from its arguments. Errors name the argument and what is allowed.

Backends check the values in a target, a support or a top-k teacher (see `XENT_CHECK_TARGETS` in `xent.cross_entropy`),
because reading them may synchronise with the device.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

from xent.core.arrays import (
    ARRAYS,
    arrays_of,
    check_classifier,
    check_dtype,
    check_shape,
    common_framework,
    shape_of,
)
from xent.core.call import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    Activation,
    Allowed,
    Call,
    Classes,
    Dense,
    Given,
    Largest,
    Options,
    Probabilities,
    Product,
    Shards,
    Source,
    Target,
    TopK,
    describe,
    dtype_name,
    fields_of,
    framework_of,
    gathered,
    replaced,
)
from xent.core.spec import (
    DIVERGENCE_STATS,
    LOG_PROB_STATS,
    STAT_NAMES,
    Array,
    LinearTeacher,
    QuantizedRows,
    Scalar,
    Subset,
    Support,
    TopKTeacher,
    bounded,
)
from xent.core.validate import (
    PLAIN,
    RANGES,
    check_int,
    check_options,
    check_subset,
    number_of,
    shards_of,
)

__all__ = [
    "NO_SUBSET",
    "Describer",
    "describe_divergence",
    "describe_log_probs",
    "describe_loss",
    "describe_top_k",
    "have_same_rows",
]

NO_SUBSET = (
    "a xent.Subset does not go with vocab_parallel, because the classes that it selects are on other ranks: pass the "
    "whole classifiers, or a teacher of the student's classes that is cut like the student"
)


Arguments = dict[str, Any]
Describer = Callable[[Arguments, Collection[str]], Call]
"""Checks the arguments of a public function, by their names, and describes the call. `passed` are the names of those
that differ from their defaults: only these are checked."""


def describe_loss(arguments: Arguments, passed: Collection[str]) -> Call:
    """Describe a call of `xent.cross_entropy` or `xent.linear_cross_entropy`."""
    framework, arguments = _checked(arguments, passed, STAT_NAMES, ())
    shards = _shards(framework, arguments, "input" in arguments)
    heads = len(arguments["shift"]) if isinstance(arguments["shift"], tuple) else None
    source, rows, axis, vocabulary = _source(arguments, passed, shards, heads)
    target = _target(framework, arguments, source, rows, axis, vocabulary)
    _check_weights(arguments, rows, vocabulary)
    return Call(source, target, _activation(arguments), _options(arguments, heads=heads), shards)


def describe_log_probs(arguments: Arguments, passed: Collection[str]) -> Call:
    """Describe a call of `xent.log_probs` or `xent.linear_log_probs`: a loss with reduction "none", not negated."""
    support = arguments["support"]
    if support is not None and not isinstance(support, Support):
        raise TypeError(f"support must be a xent.Support or None, got {describe(support)}")
    entropy = ("entropy",) if arguments["entropy"] is True else ()
    framework, arguments = _checked(arguments, passed, LOG_PROB_STATS, entropy)
    shards = _shards(framework, arguments, "input" in arguments)
    source, rows, _, _ = _source(arguments, passed, shards, None)
    target: Target = _classes(framework, arguments, source, rows, "")
    if support is not None:
        target = _allowed(arguments["target"], support, rows)
    temperature = arguments["temperature"]
    if framework_of(temperature) is not None:
        if dtype_name(temperature) not in FLOAT_DTYPES:
            raise TypeError(f"temperature must be a number, or an array of floats; got {describe(temperature)}")
        if tuple(temperature.shape) not in (rows, ()):
            raise ValueError(
                f"temperature must be a number or have the target's shape {rows}, one for each row; got "
                f"{tuple(temperature.shape)}"
            )
    options = _options(arguments, reduction="none", exact=True, is_log_probs=True)
    return Call(source, target, _activation(arguments, temperature), options, shards)


def describe_divergence(arguments: Arguments, passed: Collection[str]) -> Call:
    """Describe a call of `xent.divergence` or `xent.linear_divergence`."""
    _check_teacher(arguments["teacher"])
    framework, arguments = _checked(arguments, passed, DIVERGENCE_STATS, ())
    shards = _shards(framework, arguments, False)
    if shards is not None and isinstance(arguments["teacher"], Subset):
        raise ValueError(NO_SUBSET)
    source, rows, axis, vocabulary = _source(arguments, passed, shards, None)
    target = _teacher(framework, arguments, rows, vocabulary, axis, shards is not None)
    _check_weights(arguments, rows, vocabulary)
    temperature = arguments["temperature"]
    if framework_of(temperature) is not None:  # while a compiler traces, numbers of NumPy are tensors
        temperature = temperature.where(temperature > 0, math.nan)
    if isinstance(target, Dense):
        target = replaced(target, activation=_activation(fields_of(target.activation), temperature))
    return Call(source, target, _activation(arguments, temperature), _options(arguments), shards)


def describe_top_k(arguments: Arguments, passed: Collection[str]) -> Call:
    """Describe a call of `xent.top_k` or `xent.linear_top_k`."""
    framework, arguments = _checked(arguments, passed, (), ())
    shards = _shards(framework, arguments, False)
    source, _, _, vocabulary = _source(arguments, passed, shards, None)
    most = vocabulary if shards is None else 2**31 - 1
    k = check_int("k", arguments["k"], f"an int from 1 to the number of classes, {most},", 1, most)
    return Call(
        source, Largest(k), _activation(arguments, arguments["temperature"]), Options("none", exact=True), shards
    )


def have_same_rows(call: Call) -> bool:
    """Return whether the arrays of a described call, whose other sizes fit, have the same rows."""
    source, target, activation, options, _ = call
    if isinstance(source, Given):
        whole, axis = source.logits.shape, source.axis
        rows = whole[:axis] + whole[axis + 1 :]
    else:
        whole, rows = None, source.input.shape[:-1]
        if options.heads is not None:
            if rows[0] != options.heads:
                return False
            rows = rows[1:]
    alike: bool
    if isinstance(target, Classes):
        alike = target.ids.shape == rows
    elif isinstance(target, Probabilities):
        alike = target.probs.shape == whole if whole is not None else target.probs.shape[:-1] == rows
    elif isinstance(target, Allowed):
        alike = target.ids.shape == rows and target.offsets.shape[0] == math.prod(rows) + 1
    elif isinstance(target, TopK):
        alike = target.ids.shape[:-1] == rows and target.log_probs.shape == target.ids.shape
    elif isinstance(target, Largest):
        alike = True
    elif isinstance(target.source, Product):
        alike = target.source.input.shape[:-1] == rows
    else:
        shape, axis = target.source.logits.shape, target.source.axis
        alike = shape[:axis] + shape[axis + 1 :] == rows
    for array in (options.sample_weight, activation.temperature):
        if hasattr(array, "shape") and len(array.shape):
            alike = alike and array.shape == rows
    return alike


def _options(arguments: Arguments, **others: Any) -> Options:
    """Return the options among the arguments, and others."""
    return Options(**{name: arguments[name] for name in Options._fields if name in arguments}, **others)


def _activation(arguments: Arguments, temperature: Scalar = 1) -> Activation:
    """Return an activation; a temperature that is a number has its largest value, and 1 is None."""
    is_number = isinstance(temperature, (int, float))
    temperature = None if is_number and temperature == 1 else bounded(temperature)
    return Activation(arguments["logit_scale"], arguments["softcap"], temperature)


def _checked(
    arguments: Arguments, passed: Collection[str], names: tuple[str, ...], more: tuple[str, ...]
) -> tuple[str, Arguments]:
    """Return the framework of all arrays, and the arguments with checked options.

    `names`: the statistics that the function returns. `more`: statistics that another argument asks for.
    """
    arguments = {"inplace": False, "shift": 0, "stats": (), **arguments}
    arrays: dict[str, Array] = {}
    for name in ARRAYS:
        if name in passed:
            arrays |= arrays_of(name, arguments[name])
    first = arguments.get("input", arguments.get("logits"))
    takes_arrays = not ("teacher" in arguments or "k" in arguments)  # as numbers
    others = [name for name in passed if name not in ARRAYS]
    for name in others:
        if name in RANGES and type(arguments[name]) not in PLAIN:
            arguments[name] = number = number_of(framework_of(first), arguments[name])
            if framework_of(number) is not None and (name == "normalizer" or takes_arrays):
                arrays[name] = number
    framework = common_framework(arrays)
    if others:
        arguments |= check_options(framework, arguments, takes_arrays, others, names)
    if arguments["stats"] or more:
        arguments["stats"] = tuple(name for name in (*STAT_NAMES, "rank") if name in arguments["stats"] or name in more)
    return framework, arguments


def _shards(framework: str, arguments: Arguments, gathers: bool) -> Shards | None:
    """Return the description of shards, if there are any. `gathers`: whether the function can gather tokens."""
    if arguments["vocab_parallel"] is None:
        return None
    shards = shards_of(framework, arguments["vocab_parallel"])
    if shards.axis is not None and not gathers:
        raise ValueError(
            "sequence_parallel=True is for xent.linear_cross_entropy and xent.linear_log_probs: gather the hidden "
            "states first, and leave sequence_parallel out"
            if "teacher" in arguments or "k" in arguments
            else "sequence_parallel=True is for functions of hidden states, which they gather; logits must hold all "
            "tokens on every rank: leave sequence_parallel out, or pass hidden states to xent.linear_cross_entropy"
        )
    return shards


def _source(
    arguments: Arguments, passed: Collection[str], shards: Shards | None, heads: int | None
) -> tuple[Source, tuple[int, ...], int, int]:
    """Check and describe the logits. Return them, the shape of the rows, the axis of the classes and their number."""
    source: Source
    if "input" in arguments:
        name, array, weight = "input", arguments["input"], arguments["linear_weight"]
        check_classifier("input", array, "linear_weight", weight, arguments["linear_bias"])
        source = Product(array, weight, arguments["linear_bias"], arguments["workspace"])
        rows = _rows_of_input(arguments, shards, heads)
        axis, vocabulary = len(rows), weight.shape[0]
    else:
        name, array = "logits", arguments["logits"]
        check_dtype("logits", array)
        count, axis = len(array.shape), arguments["axis"]
        if not count:
            raise ValueError("logits must have a class axis, got a 0-d array")
        if "axis" in passed and not -count <= check_int("axis", axis) < count:
            raise ValueError(
                f"axis must be in [{-count}, {count - 1}] for logits of shape {tuple(array.shape)}, got {axis}"
            )
        axis = int(axis % count)
        vocabulary = array.shape[axis]
        source = Given(array, axis, arguments["inplace"])
        rows = tuple(array.shape[:axis] + array.shape[axis + 1 :])
    if shards is not None and isinstance(arguments.get("linear_weight"), QuantizedRows):
        raise ValueError("vocab_parallel must be None for a QuantizedRows: pass the shard's rows in a floating dtype")
    if vocabulary == 0 and shards is None:
        raise ValueError(f"there must be at least one class, got 0 with {name} of shape {tuple(array.shape)}")
    return source, rows, axis, vocabulary


def _rows_of_input(arguments: Arguments, shards: Shards | None, heads: int | None) -> tuple[int, ...]:
    """Return the shape of the rows of hidden states: of all tokens, if this rank has a part; without heads."""
    array, shift = arguments["input"], arguments["shift"]
    rows = tuple(array.shape[:-1])
    if shards is not None and shards.axis is not None:
        # This rank has a part of the tokens, along that axis; the target has all. Heads are on the first axis.
        lead, target_shape = 0 if heads is None else 1, tuple(arguments["target"].shape)
        own = rows[lead:]
        every = target_shape[:-1] if dtype_name(arguments["target"]) in FLOAT_DTYPES else target_shape
        cut = shards.axis % (len(own) + 1)
        alike = own[:cut] + own[cut + 1 :] == every[:cut] + every[cut + 1 :]
        if not own or len(own) != len(every) or not alike or own[cut] > every[cut]:
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
        return rows[1:]
    if shift and len(array.shape) < 2:
        raise ValueError(f"shift={shift} needs a sequence axis: input of shape (..., T, D), got {tuple(array.shape)}")
    return rows


def _check_weights(arguments: Arguments, rows: tuple[int, ...], vocabulary: int) -> None:
    """Check the weights of classes and rows."""
    class_weight, sample_weight = arguments.get("weight"), arguments["sample_weight"]
    if class_weight is not None:
        check_dtype("weight", class_weight)
        check_shape(class_weight, (vocabulary,), "weight must have shape {}, one per class; got {}")
    if sample_weight is not None:
        if dtype_name(sample_weight) not in (*FLOAT_DTYPES, *INTEGER_DTYPES, "bool", "bool_"):
            raise TypeError(f"sample_weight must hold real numbers or booleans, got {describe(sample_weight)}")
        check_shape(sample_weight, rows, "sample_weight must have shape {}, one per row; got {}")


def _check_teacher(teacher: object) -> None:
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


def _target(
    framework: str, arguments: Arguments, source: Source, rows: tuple[int, ...], axis: int, vocabulary: int
) -> Target:
    """Check and describe a target of class indices or class probabilities."""
    target, dtype = arguments["target"], dtype_name(arguments["target"])
    if dtype not in FLOAT_DTYPES:
        return _classes(framework, arguments, source, rows, f" or class probabilities ({', '.join(FLOAT_DTYPES)})")
    name, shape = _named_shape(arguments, source)
    check_shape(
        target,
        (*rows[:axis], vocabulary, *rows[axis:]),
        f"target of class probabilities (dtype {dtype}) must have shape {{}} for {name} of shape {shape}, got "
        "{}; class indices need an integer dtype",
    )
    return Probabilities(target)


def _classes(framework: str, arguments: Arguments, source: Source, rows: tuple[int, ...], other: str) -> Classes:
    """Check and describe a target of class indices; `other` says what it may hold besides."""
    target, dtype = arguments["target"], dtype_name(arguments["target"])
    if dtype not in INTEGER_DTYPES and not (dtype == "uint64" and framework == "numpy"):
        raise TypeError(f"target must hold class indices ({', '.join(INTEGER_DTYPES)}){other}, got dtype {dtype}")
    if (of_target := tuple(target.shape)) != rows:
        name, shape = _named_shape(arguments, source)
        first = isinstance(source, Given) and of_target == shape[:1] + shape[2:]
        raise ValueError(
            f"target of class indices must have shape {rows} for {name} of shape {shape}, got {of_target}"
            + ("; if the classes are on axis 1, pass axis=1" if first else "")
        )
    return Classes(target)


def _named_shape(arguments: Arguments, source: Source) -> tuple[str, tuple[int, ...]]:
    """Return the name and the shape of the array that the logits are, or are computed from."""
    name = "logits" if isinstance(source, Given) else "input"
    return name, tuple(arguments[name].shape)


def _allowed(ids: Array, support: Support, rows: tuple[int, ...]) -> Allowed:
    """Check the support of each row."""
    for part in ("ids", "offsets"):
        array = getattr(support, part)
        if dtype_name(array) not in INTEGER_DTYPES or len(array.shape) != 1:
            raise TypeError(f"support.{part} must be a 1-d integer array, got {describe(array)}")
    entries = math.prod(rows) + 1
    if support.offsets.shape[0] != entries:
        raise ValueError(
            f"support.offsets must have {entries} entries, one more than there are rows of target; got "
            f"{support.offsets.shape[0]}"
        )
    return Allowed(ids, support.ids, support.offsets)


def _teacher(
    framework: str, arguments: Arguments, rows: tuple[int, ...], vocabulary: int, axis: int, in_shards: bool
) -> Target:
    """Check and describe the teacher of a student with these rows, and classes on `axis`."""
    teacher, beta = arguments["teacher"], arguments["beta"]
    has_beta = framework_of(beta) is None and beta != 0
    if arguments["kind"] != "kl" and has_beta:
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
        if arguments["kind"] == "tv" and teacher.tail == "drop":
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
    activation = Activation()
    source: Source
    if isinstance(teacher, LinearTeacher):
        if ids is not None and isinstance(teacher.weight, QuantizedRows):
            raise ValueError(
                "the teacher of a xent.Subset must have a classifier whose rows can be selected, got a QuantizedRows: "
                "dequantize these rows"
            )
        check_classifier("teacher.input", teacher.input, "teacher.weight", teacher.weight, teacher.bias)
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
        numbers = {"logit_scale": teacher.logit_scale, "softcap": teacher.softcap}
        activation = Activation(**check_options(framework, numbers))
        source = Product(teacher.input, teacher.weight, teacher.bias)
    else:
        check_dtype("teacher", teacher)
        shape = tuple(teacher.shape)
        size = vocabulary if ids is None else shape[axis] if len(shape) > axis else "V"
        if shape != (*rows[:axis], size, *rows[axis:]):
            expected = shape_of(*rows[:axis], vocabulary if ids is None else "V", *rows[axis:])
            raise ValueError(
                f"teacher must have shape {expected}, the student's rows and vocabulary; got {shape}{alike}"
            )
        source = Given(teacher, axis)
    if framework == "numpy" and ids is not None:
        check_subset(ids, source)
        ids, source = None, gathered(source, ids)
    return Dense(source, activation, ids)
