"""Validate the arguments of a public function and describe the call. Errors name the argument and what is allowed.

Backends check the values in a target, a support or a top-k teacher (see `XENT_CHECK_TARGETS` in `xent.cross_entropy`),
because reading them may synchronise with the device.
"""

import math
from collections.abc import Collection
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
    Options,
    Probabilities,
    Product,
    Source,
    Target,
    TopK,
    describe,
    dtype_name,
    framework_of,
    gathered,
    replaced,
)
from xent.core.spec import LinearTeacher, QuantizedRows, QuantizedWeight, Subset, Support, TopKTeacher, bounded
from xent.core.validate import (
    PLAIN,
    RANGES,
    check_int,
    check_options,
    check_subset,
    number_of,
    shards_of,
)

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
    "torch.nn.modules": ": pass linear_weight, linear_bias = xent.integrations.torch.classifier(module)",
}
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
    arrays: dict[str, Any] = {}
    for one in _ARRAYS:
        if one in passed:
            value = given[one]
            arrays |= _parts(one, value) if isinstance(value, _RECORDS) else {one: value}
    others = [one for one in passed if one not in _ARRAYS]
    for one in others:
        if one in RANGES and type(given[one]) not in PLAIN:
            given[one] = number = number_of(framework_of(array), given[one])
            if framework_of(number) is not None and (one == "normalizer" or not is_divergence):
                arrays[one] = number
    framework = _one_framework(arrays)
    if others:
        given |= check_options(framework, given, not is_divergence, others)
    shift, shards = given["shift"], given["vocab_parallel"]
    if shards is not None:
        shards = shards_of(framework, shards)
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
        _check_classifier(framework, "input", array, "linear_weight", weight, bias)
        source: Source = Product(array, weight, bias, given["workspace"])
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
            rows = rows[1:]
        elif shift and len(array.shape) < 2:
            raise ValueError(
                f"shift={shift} needs a sequence axis: input of shape (..., T, D), got {tuple(array.shape)}"
            )
        axis, vocabulary = len(rows), weight.shape[0]
    else:
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
    if is_divergence:
        if shards is not None and isinstance(given["teacher"], Subset):
            raise ValueError(NO_SUBSET)
        target = _teacher(framework, given, rows, vocabulary, axis, shards is not None)
    else:
        target = _target(framework, given, source, rows, (*rows[:axis], vocabulary, *rows[axis:]))
    class_weight, sample_weight = given.get("weight"), given.get("sample_weight")
    if class_weight is not None:
        _check_dtype("weight", class_weight)
        _check_shape(class_weight, (vocabulary,), "weight must have shape {}, one per class; got {}")
    if sample_weight is not None:
        if dtype_name(sample_weight) not in (*FLOAT_DTYPES, *INTEGER_DTYPES, "bool", "bool_"):
            raise TypeError(f"sample_weight must hold real numbers or booleans, got {describe(sample_weight)}")
        _check_shape(sample_weight, rows, "sample_weight must have shape {}, one per row; got {}")
    named = {one: given[one] for one in Options._fields if one in given}
    options = Options(**named, exact=of_rows, accuracy_of_rows=of_rows, heads=heads)
    activation = Activation(given["logit_scale"], given["softcap"])
    if "temperature" in passed:
        heat = given["temperature"]
        activation = _divided(framework, activation, heat, rows, of_rows)
        if isinstance(target, Dense):
            target = replaced(target, activation=_divided(framework, target.activation, heat, rows, False))
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
            if hasattr(array, "full_tensor") or (name in _REQUIRED and kind.__module__.startswith("torchao.")):
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
    framework: str, given: dict[str, Any], source: Source, rows: tuple[int, ...], probabilities: tuple[int, ...]
) -> Target:
    """Check and describe the target. `rows` and `probabilities` are the shapes of class indices and probabilities."""
    target, support, of_rows = given["target"], given["support"], "entropy" in given
    dtype, found = dtype_name(target), tuple(target.shape)
    name = "logits" if isinstance(source, Given) else "input"
    shape = tuple(given[name].shape)
    if dtype in FLOAT_DTYPES and not of_rows:
        _check_shape(
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
        _check_classifier(framework, "teacher.input", teacher.input, "teacher.weight", teacher.weight, teacher.bias)
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


def _divided(framework: str, given: Activation, heat: Any, rows: tuple[int, ...], of_rows: bool) -> Activation:
    """Return scale and softcap with a temperature: a number, or in a log-probability function an array.

    A number T is folded into them, and no 16-bit dtype rounds the quotients: x = k tanh(s z / k) / T =
    k' tanh(s' z / k') with k' = k / T and s' = s / T. A 0-d tensor or MLX array is treated as a temperature per row:
    its value may be invalid, and may not be known yet.
    """
    heat, kind = bounded(heat), framework_of(heat)
    if kind is not None and of_rows:
        if dtype_name(heat) not in FLOAT_DTYPES:
            raise TypeError(f"temperature must be a number, or an array of floats; got {describe(heat)}")
        if framework == "torch" and not heat.shape:
            heat = heat.expand(rows)
        if tuple(heat.shape) not in ((rows, ()) if framework == "mlx" else (rows,)):
            raise ValueError(
                f"temperature must be a number or have the target's shape {rows}, one for each row; got "
                f"{tuple(heat.shape)}"
            )
        return replaced(given, temperature=heat)
    if kind == "torch":  # while a compiler traces
        heat = heat.where(heat > 0, math.nan)
    return Activation(_wide(given.logit_scale) / heat, None if given.softcap is None else _wide(given.softcap) / heat)


def _wide(value: Any) -> Any:
    """Convert a 0-d array to float64, on mps and for MLX to float32 if it is not float64; return numbers unchanged."""
    framework = framework_of(value)
    if framework == "torch":
        import torch

        return value.to(torch.float32 if value.device.type == "mps" else torch.float64)
    if framework == "mlx":
        import mlx.core as mx

        return value if value.dtype == mx.float64 else value.astype(mx.float32)
    return value


def _shape_of(*sizes: Any) -> str:
    """Return a shape whose sizes may have names: "(6, D)"."""
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def _check_classifier(framework: str, of_input: str, input: Any, of_weight: str, weight: Any, bias: Any) -> None:
    """Check hidden states and a classifier. `of_input` and `of_weight` are their names in error messages."""
    of_bias = of_weight.replace("weight", "bias")
    for name, array in ((of_input, input), (of_weight, weight), (of_bias, bias)):
        if isinstance(array, QuantizedWeight):
            _check_quantized(framework, array, name)
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
