"""Validate the arguments of a divergence and describe the call. Errors name the argument and what is allowed.

This module checks shapes, dtypes and numbers. Backends check the values in a `TopKTeacher`.
"""

from typing import Any

from xent.core.arrays import (
    INTEGER_DTYPES,
    describe,
    dtype_name,
    framework_of,
    number_of,
    one_framework,
    shape_of,
    shown,
)
from xent.core.call import Activation, Call, Dense, Given, Options, Product, Shards, Source, TopK, replaced
from xent.core.options import (
    check_kind,
    check_numbers,
    check_reduction,
    check_stats,
    divided,
    one_shift,
    shift_and_workspace,
)
from xent.core.shards import shards_of
from xent.core.spec import DIVERGENCE_STATS, bounded
from xent.core.subsets import NO_SUBSET, check_ids, check_subset, check_values, gathered
from xent.core.teachers import TAILS, LinearTeacher, Subset, TopKTeacher
from xent.core.validate_arrays import (
    check_classifier,
    check_float,
    check_normalizer,
    check_sample_weight,
    check_sequence,
    class_axis,
    parts_of,
)

__all__ = ["divergence_call", "linear_divergence_call"]


def divergence_call(logits: Any, teacher: Any, *, axis: Any, vocab_parallel: Any = None, **options: Any) -> Call:
    """Check the arguments of `xent.divergence` and describe the call."""
    framework, options = _framework_of({"logits": logits}, teacher, options)
    axis, shape = class_axis(logits, axis), tuple(logits.shape)
    check_reduction(options["reduction"])
    rows = shape[:axis] + shape[axis + 1 :]
    shards = _shards_of(framework, vocab_parallel, teacher)
    return _call(framework, Given(logits, axis), teacher, rows, shape[axis], shape, shards, **options)


def linear_divergence_call(
    input: Any,
    linear_weight: Any,
    teacher: Any,
    *,
    linear_bias: Any,
    shift: Any,
    workspace: Any,
    vocab_parallel: Any = None,
    **options: Any,
) -> Call:
    """Check the arguments of `xent.linear_divergence` and describe the call."""
    student = {"input": input, **parts_of(linear_weight, "linear_weight"), "linear_bias": linear_bias}
    framework, options = _framework_of(student, teacher, options)
    check_classifier(framework, input, linear_weight, linear_bias)
    shift, workspace = shift_and_workspace(one_shift(shift), workspace)
    check_reduction(options["reduction"])
    rows, vocabulary = tuple(input.shape[:-1]), linear_weight.shape[0]
    check_sequence(shift, input)
    source = Product(input, linear_weight, linear_bias, workspace)
    shards = _shards_of(framework, vocab_parallel, teacher)
    call = _call(framework, source, teacher, rows, vocabulary, (*rows, vocabulary), shards, **options)
    return replaced(call, options=replaced(call.options, shift=shift))


def _shards_of(framework: str, vocab_parallel: Any, teacher: Any) -> Shards | None:
    """Return the validated description of shards. Raise ValueError for what a divergence in shards does not take."""
    shards = shards_of(framework, vocab_parallel)
    if shards is None:
        return None
    if isinstance(teacher, Subset):
        raise ValueError(NO_SUBSET)
    if shards.axis is not None:
        raise ValueError(
            "sequence_parallel=True is for xent.linear_cross_entropy and xent.linear_log_probs: gather the hidden "
            "states of student and teacher, and leave sequence_parallel out"
        )
    return shards


def _framework_of(student: dict[str, Any], teacher: Any, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the framework of all arrays, and the options with numbers of NumPy as Python numbers."""
    owner = framework_of(next(iter(student.values())))
    named = ("beta", "temperature", "softcap", "logit_scale", "normalizer")
    options = options | {name: number_of(owner, options[name]) for name in named}
    others = {name: options[name] for name in ("sample_weight", "normalizer")}
    return one_framework(**student, **_arrays_of(teacher), **others), options


def _arrays_of(teacher: Any) -> dict[str, Any]:
    """Return a teacher's arrays, by the names that error messages use."""
    if isinstance(teacher, Subset):
        check_subset(teacher)
        named = {**_arrays_of(teacher.teacher), "teacher.ids": teacher.ids}
    elif isinstance(teacher, TopKTeacher):
        named = {"teacher.ids": teacher.ids, "teacher.log_probs": teacher.log_probs}
    elif isinstance(teacher, LinearTeacher):
        named = {"teacher.input": teacher.input, **parts_of(teacher.weight, "teacher.weight")}
        optional = {"teacher.bias": teacher.bias, "teacher.weight.biases": named.pop("teacher.weight.biases", None)}
        named |= {name: array for name, array in optional.items() if array is not None}
    elif framework_of(teacher) is None:
        raise TypeError(
            "teacher must be an array of logits, a xent.LinearTeacher, a xent.TopKTeacher or a xent.Subset, got "
            f"{describe(teacher)}"
        )
    else:
        named = {"teacher": teacher}
    for name, array in named.items():
        if framework_of(array) is None:
            raise TypeError(f"{name} must be a torch, MLX or NumPy array, got {describe(array)}")
    return named


def _call(
    framework: str,
    source: Source,
    teacher: Any,
    rows: tuple[int, ...],
    vocabulary: int,
    shape: tuple[int, ...],
    shards: Shards | None,
    *,
    sample_weight: Any,
    normalizer: Any,
    kind: Any,
    beta: Any,
    temperature: Any,
    softcap: Any,
    logit_scale: Any,
    reduction: Any,
    stats: Any = (),
) -> Call:
    """Check the teacher and the options, for a student with logits of this shape, and describe the call."""
    check_kind(framework, kind, beta)
    check_numbers(framework, temperature=temperature, softcap=softcap, logit_scale=logit_scale)
    target = _target_of(framework, teacher, rows, vocabulary, shape, shards, source, temperature, kind, beta)
    if framework == "numpy" and isinstance(target, Dense) and target.ids is not None:
        check_values(target.ids, target.source)
        target = Dense(gathered(target.source, target.ids), target.activation)
    check_sample_weight(sample_weight, rows)
    check_normalizer(framework, normalizer, reduction)
    if vocabulary == 0 and shards is None:
        raise ValueError("there must be at least one class, got 0")
    options = Options(
        reduction,
        sample_weight=sample_weight,
        normalizer=normalizer,
        stats=check_stats(stats, DIVERGENCE_STATS),
        kind=kind,
        beta=beta,
    )
    return Call(source, target, divided(Activation(logit_scale, bounded(softcap)), temperature), options, shards)


def _target_of(
    framework: str,
    teacher: Any,
    rows: tuple[int, ...],
    vocabulary: int,
    shape: tuple[int, ...],
    shards: Shards | None,
    student: Source,
    temperature: Any,
    kind: str,
    beta: Any,
) -> Dense | TopK:
    """Check a teacher and return it with the temperature folded into its softcap and scale."""
    ids = None
    if isinstance(teacher, Subset):
        ids, teacher = teacher.ids, teacher.teacher
        check_ids(ids, vocabulary)
    alike = "" if shards is None else "; with vocab_parallel student and teacher must be cut alike"
    if isinstance(teacher, TopKTeacher):
        _check_top_k(teacher, rows, vocabulary if shards is None else 2**31)
        if framework_of(beta) is None and beta != 0:
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
    if isinstance(teacher, LinearTeacher):
        names = ("teacher.input", "teacher.weight", "teacher.bias")
        check_classifier(framework, teacher.input, teacher.weight, teacher.bias, names)
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
        cap, scale = (number_of(framework, value) for value in (teacher.softcap, teacher.logit_scale))
        check_numbers(framework, softcap=cap, logit_scale=scale)
        own = Activation(scale, bounded(cap))
        return Dense(Product(teacher.input, teacher.weight, teacher.bias), divided(own, temperature), ids)
    check_float("teacher", teacher)
    axis = student.axis if isinstance(student, Given) else len(rows)
    found = tuple(teacher.shape)
    if found != shape and (ids is None or found[:axis] + found[axis + 1 :] != rows or len(found) != len(shape)):
        expected = shape if ids is None else shape_of(*rows[:axis], "V", *rows[axis:])
        raise ValueError(f"teacher must have shape {expected}, the student's rows and vocabulary; got {found}{alike}")
    return Dense(Given(teacher, axis), divided(Activation(), temperature), ids)


def _check_top_k(teacher: TopKTeacher, rows: tuple[int, ...], vocabulary: int) -> None:
    if teacher.tail not in TAILS:
        raise ValueError(f"teacher.tail must be one of {', '.join(map(repr, TAILS))}, got {shown(teacher.tail)}")
    if dtype_name(teacher.ids) not in INTEGER_DTYPES:
        raise TypeError(f"teacher.ids must have an integer dtype, got {describe(teacher.ids)}")
    check_float("teacher.log_probs", teacher.log_probs)
    shape = tuple(teacher.ids.shape)
    if shape[:-1] != rows or len(shape) != len(rows) + 1:
        raise ValueError(f"teacher.ids must have shape {shape_of(*rows, 'K')}, K classes for each row; got {shape}")
    if not 1 <= shape[-1] <= vocabulary:
        raise ValueError(f"teacher.ids must hold 1 to {vocabulary} classes a row, the vocabulary; got {shape[-1]}")
    if tuple(teacher.log_probs.shape) != shape:
        raise ValueError(
            f"teacher.log_probs must have the shape of teacher.ids, {shape}; got {tuple(teacher.log_probs.shape)}"
        )
