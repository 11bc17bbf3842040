"""Validate the arguments of a public function and describe the call. Errors name the argument and what is allowed.

Backends check the values in a target, a support or a top-k teacher (see `XENT_CHECK_TARGETS` in `xent.cross_entropy`),
because reading them may synchronise with the device.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

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
    framework_of,
    gathered,
    replaced,
)
from xent.core.spec import (
    DIVERGENCE_STATS,
    LOG_PROB_STATS,
    STAT_NAMES,
    LinearTeacher,
    QuantizedRows,
    QuantizedWeight,
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
_PARTS: dict[type, tuple[str, ...]] = {
    QuantizedWeight: ("packed", "scales", "biases"),
    QuantizedRows: ("packed",),
    LinearTeacher: ("input", "weight", "bias"),
    TopKTeacher: ("ids", "log_probs"),
    Support: ("ids", "offsets"),
    Subset: ("teacher", "ids"),
}
"""The arrays of arguments that hold several."""
_RECORDS = tuple(_PARTS)
_NUMBERS = ("normalizer", "label_smoothing", "z_loss", "softcap", "logit_scale")
"""The options that may be 0-d tensors, also on the CPU."""
_HINTS = {
    "mlx.nn": ": pass linear_weight, linear_bias = xent.integrations.mlx.classifier(module)",
    "torch.nn.modules": ": if it is quantized, pass what xent.integrations.torch.classifier(module) returns; "
    "otherwise: pass module.weight, and linear_bias=module.bias",
}
_OF_TORCHAO = ("tensor_data_names", "tensor_impl")
"""Attributes of quantized tensors of torchao."""
_REQUIRED = (
    "logits",
    "input",
    "linear_weight",
    "target",
    "teacher.input",
    "teacher.weight",
    "teacher.ids",
    "teacher.log_probs",
)


Arguments = dict[str, Any]
Describer = Callable[[Arguments, Collection[str]], Call]
"""Checks the arguments of a public function, by their names, and describes the call. The arguments that are not among
those passed have valid values."""


def describe_loss(arguments: Arguments, passed: Collection[str]) -> Call:
    """Describe a call of `xent.cross_entropy` or `xent.linear_cross_entropy`."""
    framework, given = _checked(arguments, passed, STAT_NAMES, STAT_NAMES[:0])
    shards = _shards(framework, given, "input" in given)
    heads = len(given["shift"]) if isinstance(given["shift"], tuple) else None
    source, rows, axis, vocabulary = _source(given, passed, shards, heads)
    target = _target(framework, given, source, rows, axis, vocabulary)
    _check_weights(given, rows, vocabulary)
    named = {name: given[name] for name in Options._fields if name in given}
    activation = Activation(given["logit_scale"], given["softcap"])
    return Call(source, target, activation, Options(**named, heads=heads), shards)


def describe_log_probs(arguments: Arguments, passed: Collection[str]) -> Call:
    """Describe a call of `xent.log_probs` or `xent.linear_log_probs`: a loss with reduction "none", not negated."""
    support = arguments["support"]
    if support is not None and not isinstance(support, Support):
        raise TypeError(f"support must be a xent.Support or None, got {describe(support)}")
    entropy = ("entropy",) if arguments["entropy"] is True else ()
    framework, given = _checked(arguments, passed, LOG_PROB_STATS, entropy)
    shards = _shards(framework, given, "input" in given)
    source, rows, _, _ = _source(given, passed, shards, None)
    target: Target = _classes(framework, given, source, rows, "")
    if support is not None:
        target = _allowed(given["target"], support, rows)
    heat = given["temperature"]
    if framework_of(heat) is not None:
        if dtype_name(heat) not in FLOAT_DTYPES:
            raise TypeError(f"temperature must be a number, or an array of floats; got {describe(heat)}")
        if tuple(heat.shape) not in (rows, ()):
            raise ValueError(
                f"temperature must be a number or have the target's shape {rows}, one for each row; got "
                f"{tuple(heat.shape)}"
            )
    named = {name: given[name] for name in ("ignore_index", "stats", "shift")}
    options = Options("none", **named, exact=True, accuracy_of_rows=True)
    return Call(source, target, _activation(given["logit_scale"], given["softcap"], heat), options, shards)


def describe_divergence(arguments: Arguments, passed: Collection[str]) -> Call:
    """Describe a call of `xent.divergence` or `xent.linear_divergence`."""
    _check_teacher(arguments["teacher"])
    framework, given = _checked(arguments, passed, DIVERGENCE_STATS, STAT_NAMES[:0])
    shards = _shards(framework, given, False)
    if shards is not None and isinstance(given["teacher"], Subset):
        raise ValueError(NO_SUBSET)
    source, rows, axis, vocabulary = _source(given, passed, shards, None)
    target = _teacher(framework, given, rows, vocabulary, axis, shards is not None)
    _check_weights(given, rows, vocabulary)
    heat = given["temperature"]
    if framework_of(heat) is not None:  # while a compiler traces, numbers of NumPy are tensors
        heat = heat.where(heat > 0, math.nan)
    if isinstance(target, Dense):
        target = replaced(target, activation=_activation(*target.activation[:2], heat))
    options = Options(**{name: given[name] for name in Options._fields if name in given})
    return Call(source, target, _activation(given["logit_scale"], given["softcap"], heat), options, shards)


def describe_top_k(arguments: Arguments, passed: Collection[str]) -> Call:
    """Describe a call of `xent.top_k` or `xent.linear_top_k`."""
    framework, given = _checked(arguments, passed, (), ())
    shards = _shards(framework, given, False)
    source, _, _, vocabulary = _source(given, passed, shards, None)
    most = vocabulary if shards is None else 2**31 - 1
    k = check_int("k", given["k"], f"an int from 1 to the number of classes, {most},", 1, most)
    activation = _activation(given["logit_scale"], given["softcap"], given["temperature"])
    return Call(source, Largest(k), activation, Options("none", exact=True), shards)


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
        alike = target.values.shape == whole if whole is not None else target.values.shape[:-1] == rows
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


def _activation(logit_scale: Any, softcap: Any, temperature: Any) -> Activation:
    """Return an activation; a temperature that is a number has its largest value, and 1 is None."""
    is_number = isinstance(temperature, (int, float))
    return Activation(logit_scale, softcap, None if is_number and temperature == 1 else bounded(temperature))


def _checked(
    arguments: Arguments, passed: Collection[str], names: tuple[str, ...], more: tuple[str, ...]
) -> tuple[str, Arguments]:
    """Return the framework of all arrays, and the arguments with checked options.

    `names`: the statistics that the function returns. `more`: statistics that another argument asks for.
    """
    given = {"inplace": False, "shift": 0, "stats": (), **arguments}
    arrays: dict[str, Any] = {}
    for name in _ARRAYS:
        if name in passed:
            value = given[name]
            arrays |= _parts(name, value) if isinstance(value, _RECORDS) else {name: value}
    first, is_plain = given.get("input", given.get("logits")), "teacher" in given or "k" in given
    others = [name for name in passed if name not in _ARRAYS]
    for name in others:
        if name in RANGES and type(given[name]) not in PLAIN:
            given[name] = number = number_of(framework_of(first), given[name])
            if framework_of(number) is not None and (name == "normalizer" or not is_plain):
                arrays[name] = number
    framework = _one_framework(arrays)
    if others:
        given |= check_options(framework, given, not is_plain, others, names)
    if given["stats"] or more:
        given["stats"] = tuple(name for name in (*STAT_NAMES, "rank") if name in given["stats"] or name in more)
    return framework, given


def _shards(framework: str, given: Arguments, gathers: bool) -> Shards | None:
    """Return the description of shards, if there are any. `gathers`: whether the function can gather tokens."""
    if given["vocab_parallel"] is None:
        return None
    shards = shards_of(framework, given["vocab_parallel"])
    if shards.axis is not None and not gathers:
        raise ValueError(
            "sequence_parallel=True is for xent.linear_cross_entropy and xent.linear_log_probs: gather the hidden "
            "states first, and leave sequence_parallel out"
            if "teacher" in given or "k" in given
            else "sequence_parallel=True is for functions of hidden states, which they gather; logits must hold all "
            "tokens on every rank: leave sequence_parallel out, or pass hidden states to xent.linear_cross_entropy"
        )
    return shards


def _source(
    given: Arguments, passed: Collection[str], shards: Shards | None, heads: int | None
) -> tuple[Source, tuple[int, ...], int, int]:
    """Check and describe the logits. Return them, the shape of the rows, the axis of the classes and their number."""
    source: Source
    if "input" in given:
        name, array, weight = "input", given["input"], given["linear_weight"]
        _check_classifier("input", array, "linear_weight", weight, given["linear_bias"])
        source = Product(array, weight, given["linear_bias"], given["workspace"])
        rows = _rows_of_input(given, shards, heads)
        axis, vocabulary = len(rows), weight.shape[0]
    else:
        name, array = "logits", given["logits"]
        _check_dtype("logits", array)
        count, axis = len(array.shape), given["axis"]
        if not count:
            raise ValueError("logits must have a class axis, got a 0-d array")
        if "axis" in passed and not -count <= check_int("axis", axis) < count:
            raise ValueError(
                f"axis must be in [{-count}, {count - 1}] for logits of shape {tuple(array.shape)}, got {axis}"
            )
        axis = int(axis % count)
        vocabulary = array.shape[axis]
        source = Given(array, axis, given["inplace"])
        rows = tuple(array.shape[:axis] + array.shape[axis + 1 :])
    if shards is not None and isinstance(given.get("linear_weight"), QuantizedRows):
        raise ValueError("vocab_parallel must be None for a QuantizedRows: pass the shard's rows in a floating dtype")
    if vocabulary == 0 and shards is None:
        raise ValueError(f"there must be at least one class, got 0 with {name} of shape {tuple(array.shape)}")
    return source, rows, axis, vocabulary


def _rows_of_input(given: Arguments, shards: Shards | None, heads: int | None) -> tuple[int, ...]:
    """Return the shape of the rows of hidden states: of all tokens, if this rank has a part; without heads."""
    array, shift = given["input"], given["shift"]
    rows = tuple(array.shape[:-1])
    if shards is not None and shards.axis is not None:
        # This rank has a part of the tokens, along that axis; the target has all. Heads are on the first axis.
        lead, target_shape = 0 if heads is None else 1, tuple(given["target"].shape)
        own = rows[lead:]
        every = target_shape[:-1] if dtype_name(given["target"]) in FLOAT_DTYPES else target_shape
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


def _check_weights(given: Arguments, rows: tuple[int, ...], vocabulary: int) -> None:
    """Check the weights of classes and rows."""
    class_weight, sample_weight = given.get("weight"), given["sample_weight"]
    if class_weight is not None:
        _check_dtype("weight", class_weight)
        _check_shape(class_weight, (vocabulary,), "weight must have shape {}, one per class; got {}")
    if sample_weight is not None:
        if dtype_name(sample_weight) not in (*FLOAT_DTYPES, *INTEGER_DTYPES, "bool", "bool_"):
            raise TypeError(f"sample_weight must hold real numbers or booleans, got {describe(sample_weight)}")
        _check_shape(sample_weight, rows, "sample_weight must have shape {}, one per row; got {}")


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


def _parts(name: str, record: Any) -> dict[str, Any]:
    """Return the arrays of an argument that holds several, by the names that error messages use."""
    found: dict[str, Any] = {}
    for part in next(parts for kind, parts in _PARTS.items() if isinstance(record, kind)):
        value, path = getattr(record, part), name if part == "teacher" else f"{name}.{part}"
        if isinstance(value, _RECORDS):
            found |= _parts(path, value)
            continue
        if value is None and part in ("packed", "scales"):
            raise TypeError(f"{path} must be an MLX array, got None")
        if name == "support" and framework_of(value) is None:
            raise TypeError(f"{path} must be a 1-d integer array, got {describe(value)}")
        found[path] = value
    return found


def _one_framework(arrays: dict[str, Any]) -> str:
    """Return the framework that all arrays share; those that are None do not count.

    Raise TypeError for an array of another framework, and for a sparse, nested, sharded or masked one, ValueError for
    a tensor on another device.
    """
    first, framework, kind, device = "", None, None, None
    for name, array in arrays.items():
        if name not in _REQUIRED and array is None:
            continue
        if type(array) is not kind:
            owner, kind = framework_of(array), type(array)
            if owner is None:
                modules = [base.__module__ for base in kind.__mro__ if name == "linear_weight"]
                hints = (hint for start, hint in _HINTS.items() if any(one.startswith(start) for one in modules))
                raise TypeError(f"{name} must be a torch, MLX or NumPy array, got {describe(array)}{next(hints, '')}")
            if framework is None:
                first, framework, device = name, owner, getattr(array, "device", None)
            elif owner != framework:
                raise TypeError(
                    f"all arrays of a call must be of one framework: {first} is a {framework} array and {name} a "
                    f"{owner} array; convert one of them"
                )
        if framework == "torch":
            if array.device != device and not (name in _NUMBERS and array.device.type == "cpu"):
                raise ValueError(
                    f"all tensors of a call must be on one device: {first} is on {device}, {name} on {array.device}; "
                    f"move it with {name}.to({first}.device)"
                )
            if array.is_nested:
                raise TypeError(f"{name} must be a dense tensor, got a nested one: pad it, or pass its values()")
            if str(array.layout) != "torch.strided":
                raise TypeError(f"{name} must be a dense tensor, got layout {array.layout}: pass {name}.to_dense()")
            if hasattr(array, "full_tensor") or any(hasattr(array, part) for part in _OF_TORCHAO):
                raise TypeError(
                    f"{name} must be a plain tensor, got a {type(array).__name__}: pass {name}.to_local() or "
                    f"{name}.full_tensor(), of a quantized head what xent.integrations.torch.classifier(module) returns"
                )
        elif framework == "numpy" and hasattr(array, "mask"):
            raise TypeError(
                f"{name} must be a plain array, got a {type(array).__name__}, whose mask would be ignored: pass its "
                "data, and set ignore_index in target, or sample_weight=0, where an entry does not count"
            )
    assert framework is not None  # the first array is required
    return framework


def _target(
    framework: str, given: Arguments, source: Source, rows: tuple[int, ...], axis: int, vocabulary: int
) -> Target:
    """Check and describe a target of class indices or class probabilities."""
    target, dtype = given["target"], dtype_name(given["target"])
    if dtype not in FLOAT_DTYPES:
        return _classes(framework, given, source, rows, f" or class probabilities ({', '.join(FLOAT_DTYPES)})")
    name, shape = _named_shape(given, source)
    _check_shape(
        target,
        (*rows[:axis], vocabulary, *rows[axis:]),
        f"target of class probabilities (dtype {dtype}) must have shape {{}} for {name} of shape {shape}, got "
        "{}; class indices need an integer dtype",
    )
    return Probabilities(target)


def _classes(framework: str, given: Arguments, source: Source, rows: tuple[int, ...], other: str) -> Classes:
    """Check and describe a target of class indices; `other` says what it may hold besides."""
    target, dtype = given["target"], dtype_name(given["target"])
    if dtype not in INTEGER_DTYPES and not (dtype == "uint64" and framework == "numpy"):
        raise TypeError(f"target must hold class indices ({', '.join(INTEGER_DTYPES)}){other}, got dtype {dtype}")
    if (of_target := tuple(target.shape)) != rows:
        name, shape = _named_shape(given, source)
        first = isinstance(source, Given) and of_target == shape[:1] + shape[2:]
        raise ValueError(
            f"target of class indices must have shape {rows} for {name} of shape {shape}, got {of_target}"
            + ("; if the classes are on axis 1, pass axis=1" if first else "")
        )
    return Classes(target)


def _named_shape(given: Arguments, source: Source) -> tuple[str, tuple[int, ...]]:
    """Return the name and the shape of the array that the logits are, or are computed from."""
    name = "logits" if isinstance(source, Given) else "input"
    return name, tuple(given[name].shape)


def _allowed(ids: Any, support: Support, rows: tuple[int, ...]) -> Allowed:
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
    framework: str, given: dict[str, Any], rows: tuple[int, ...], vocabulary: int, axis: int, in_shards: bool
) -> Target:
    """Check and describe the teacher of a student with these rows, and classes on `axis`."""
    teacher, kind, beta = given["teacher"], given["kind"], given["beta"]
    has_beta = framework_of(beta) is None and beta != 0
    if kind != "kl" and has_beta:
        raise ValueError(f"beta must be 0 with kind='tv', got {beta!r}: it selects one of kind='kl'")
    if isinstance(teacher, TopKTeacher):
        check_options(framework, {"teacher.tail": teacher.tail})
        _check_dtype("teacher.ids", teacher.ids, INTEGER_DTYPES)
        _check_dtype("teacher.log_probs", teacher.log_probs)
        shape, most = tuple(teacher.ids.shape), 2**31 if in_shards else vocabulary
        if shape[:-1] != rows or len(shape) != len(rows) + 1:
            raise ValueError(
                f"teacher.ids must have shape {_shape_of(*rows, 'K')}, K classes for each row; got {shape}"
            )
        if not 1 <= shape[-1] <= most:
            raise ValueError(f"teacher.ids must hold 1 to {most} classes a row, the vocabulary; got {shape[-1]}")
        _check_shape(teacher.log_probs, shape, "teacher.log_probs must have the shape of teacher.ids, {}; got {}")
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
        _check_dtype("teacher.ids", ids, INTEGER_DTYPES)
        _check_shape(
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
        _check_classifier("teacher.input", teacher.input, "teacher.weight", teacher.weight, teacher.bias)
        if ids is None and teacher.weight.shape[0] != vocabulary:
            raise ValueError(
                f"teacher.weight must have {vocabulary} rows, the student's vocabulary, got {teacher.weight.shape[0]}: "
                f"a divergence compares distributions over the same classes{alike}"
            )
        if tuple(teacher.input.shape[:-1]) != rows:
            raise ValueError(
                f"teacher.input must have shape {_shape_of(*rows, 'D')}, a hidden state for each row of the student; "
                f"got {tuple(teacher.input.shape)}"
            )
        numbers = {"logit_scale": teacher.logit_scale, "softcap": teacher.softcap}
        activation = Activation(**check_options(framework, numbers))
        source = Product(teacher.input, teacher.weight, teacher.bias)
    else:
        _check_dtype("teacher", teacher)
        found = tuple(teacher.shape)
        size = vocabulary if ids is None else found[axis] if len(found) > axis else "V"
        if found != (*rows[:axis], size, *rows[axis:]):
            expected = _shape_of(*rows[:axis], vocabulary if ids is None else "V", *rows[axis:])
            raise ValueError(
                f"teacher must have shape {expected}, the student's rows and vocabulary; got {found}{alike}"
            )
        source = Given(teacher, axis)
    if framework == "numpy" and ids is not None:
        check_subset(ids, source)
        ids, source = None, gathered(source, ids)
    return Dense(source, activation, ids)


def _shape_of(*sizes: Any) -> str:
    """Return a shape whose sizes may have names: "(6, D)"."""
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def _check_classifier(of_input: str, input: Any, of_weight: str, weight: Any, bias: Any) -> None:
    """Check hidden states and a classifier. `of_input` and `of_weight` are their names in error messages."""
    of_bias = of_weight.replace("weight", "bias")
    for name, array in ((of_input, input), (of_weight, weight), (of_bias, bias)):
        if isinstance(array, QuantizedWeight):
            _check_quantized(array, name)
        elif isinstance(array, QuantizedRows):
            if array.packed.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient, which a quantized classifier does not get: freeze it with "
                    "requires_grad_(False), or pass one in a floating dtype"
                )
        elif array is not None:
            _check_dtype(name, array)
    if len(input.shape) < 1:
        raise ValueError(f"{of_input} must have shape (..., D), got a 0-d array")
    if len(weight.shape) != 2 or weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"{of_weight} must have shape (V, D) with D = {input.shape[-1]}, the last axis of {of_input} "
            f"{tuple(input.shape)}; got {tuple(weight.shape)}"
        )
    if bias is not None:
        _check_shape(bias, (weight.shape[0],), f"{of_bias} must have shape {{}}, the rows of {of_weight}; got {{}}")


def _check_quantized(weight: QuantizedWeight, name: str) -> None:
    """Raise TypeError or ValueError for an invalid quantized classifier."""
    if framework_of(weight.packed) != "mlx":
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


def _check_dtype(name: str, array: Any, allowed: tuple[str, ...] = FLOAT_DTYPES) -> None:
    """Raise TypeError for an array of another dtype."""
    if dtype_name(array) not in allowed:
        dtypes = f"must have one of the dtypes {', '.join(allowed)};"
        raise TypeError(
            f"{name} {'must have an integer dtype,' if 'int64' in allowed else dtypes} got {describe(array)}"
        )


def _check_shape(array: Any, shape: tuple[Any, ...], message: str) -> None:
    """Raise ValueError for an array of another shape. `message` has two places, for the right and for its shape."""
    if tuple(array.shape) != shape:
        raise ValueError(message.format(shape, tuple(array.shape)))
