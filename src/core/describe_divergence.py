"""Validate the arguments of a divergence and describe the call. Errors name the argument and what is allowed.

This module checks shapes, dtypes and numbers. Backends check the values in a `TopKTeacher`.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from xent.core.arrays import (
    INTEGER_DTYPES,
    describe,
    framework_of,
    number_of,
    one_framework,
    shape_of,
    shown,
)
from xent.core.call import (
    Activation,
    Call,
    Dense,
    Given,
    Options,
    Product,
    Source,
    TopK,
    replaced,
    vocabulary_of,
)
from xent.core.spec import (
    DIVERGENCE_STATS,
    DIVERGENCES,
    REDUCTIONS,
    TAILS,
    LinearTeacher,
    QuantizedWeight,
    Subset,
    TopKTeacher,
)
from xent.core.validate import (
    check_classifier,
    check_dtype,
    check_name,
    check_numbers,
    check_sequence,
    check_shape,
    check_stats,
    check_weights,
    class_axis,
    divided,
    one_shift,
    parts_of,
    shards_of,
    shift_and_workspace,
)

__all__ = ["NO_SUBSET", "check_values", "divergence_call", "gathered", "linear_divergence_call"]

NO_SUBSET = (
    "a xent.Subset does not go with vocab_parallel, because the classes that it selects are on other ranks: pass the "
    "whole classifiers, or a teacher of the student's classes that is cut like the student"
)


_NAMES_OF_TEACHER = ("teacher.input", "teacher.weight", "teacher.bias")


def divergence_call(logits: Any, teacher: Any, *, axis: Any, **options: Any) -> Call:
    """Check the arguments of `xent.divergence` and describe the call."""
    framework, normalizer = _framework_of({"logits": logits}, teacher, options)
    axis = class_axis(logits, axis)
    options |= {"normalizer": normalizer, "shift": 0}
    return _call(framework, Given(logits, axis), teacher, tuple(logits.shape), axis, **options)


def linear_divergence_call(
    input: Any, linear_weight: Any, teacher: Any, *, linear_bias: Any, shift: Any, workspace: Any, **options: Any
) -> Call:
    """Check the arguments of `xent.linear_divergence` and describe the call."""
    student = {"input": input, **parts_of(linear_weight, "linear_weight"), "linear_bias": linear_bias}
    framework, normalizer = _framework_of(student, teacher, options)
    check_classifier(framework, input, linear_weight, linear_bias)
    shift, workspace = shift_and_workspace(one_shift(shift), workspace)
    check_sequence(shift, input)
    source = Product(input, linear_weight, linear_bias, workspace)
    shape = (*input.shape[:-1], linear_weight.shape[0])
    options |= {"normalizer": normalizer, "shift": shift}
    return _call(framework, source, teacher, shape, len(shape) - 1, **options)


def _framework_of(student: dict[str, Any], teacher: Any, options: dict[str, Any]) -> tuple[str, Any]:
    """Return the framework of all arrays, and the normalizer, one of NumPy as a Python number."""
    normalizer = number_of(framework_of(next(iter(student.values()))), options["normalizer"])
    others = {"sample_weight": options["sample_weight"], "normalizer": normalizer}
    return one_framework({**student, **_arrays_of(teacher), **others}), normalizer


def _arrays_of(teacher: Any) -> dict[str, Any]:
    """Return a teacher's arrays, by the names that error messages use."""
    if isinstance(teacher, Subset):
        whole = teacher.teacher
        if isinstance(whole, TopKTeacher):
            raise ValueError(
                "a xent.Subset of a TopKTeacher is not possible: the teacher's probabilities of the student's classes "
                "that were not stored are unknown. Pass logits or a LinearTeacher, or store the K classes of the "
                "student's vocabulary"
            )
        if framework_of(whole) is None and not isinstance(whole, LinearTeacher):
            raise TypeError(
                f"the teacher of a xent.Subset must be an array of logits or a xent.LinearTeacher, got "
                f"{describe(whole)}"
            )
        return {**_arrays_of(whole), "teacher.ids": teacher.ids}
    if isinstance(teacher, TopKTeacher):
        return {"teacher.ids": teacher.ids, "teacher.log_probs": teacher.log_probs}
    if isinstance(teacher, LinearTeacher):
        of_input, of_weight, of_bias = _NAMES_OF_TEACHER
        return {of_input: teacher.input, **parts_of(teacher.weight, of_weight), of_bias: teacher.bias}
    if framework_of(teacher) is None:
        raise TypeError(
            "teacher must be an array of logits, a xent.LinearTeacher, a xent.TopKTeacher or a xent.Subset, got "
            f"{describe(teacher)}"
        )
    return {"teacher": teacher}


def _call(
    framework: str,
    source: Source,
    teacher: Any,
    shape: tuple[int, ...],
    axis: int,
    *,
    sample_weight: Any,
    normalizer: Any,
    kind: Any,
    beta: Any,
    temperature: Any,
    softcap: Any,
    logit_scale: Any,
    reduction: Any,
    shift: Any,
    stats: Any = (),
    vocab_parallel: Any = None,
) -> Call:
    """Check the teacher and the options, for a student with logits of this shape, and describe the call."""
    check_name("reduction", reduction, REDUCTIONS)
    check_name("kind", kind, DIVERGENCES)
    given = {"beta": beta, "temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    beta, temperature, softcap, logit_scale = check_numbers(framework, given)
    has_beta = framework_of(beta) is None and beta != 0
    if kind != "kl" and has_beta:
        raise ValueError(f"beta must be 0 with kind='tv', got {beta!r}: it selects one of kind='kl'")
    shards = shards_of(framework, vocab_parallel)
    if shards is not None and isinstance(teacher, Subset):
        raise ValueError(NO_SUBSET)
    if shards is not None and shards.axis is not None:
        raise ValueError(
            "sequence_parallel=True is for xent.linear_cross_entropy and xent.linear_log_probs: gather the hidden "
            "states of student and teacher, and leave sequence_parallel out"
        )
    rows, vocabulary = shape[:axis] + shape[axis + 1 :], shape[axis]
    target: Dense | TopK
    if isinstance(teacher, TopKTeacher):
        _check_top_k(teacher, rows, vocabulary if shards is None else 2**31)
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
        target = TopK(teacher.ids, teacher.log_probs, teacher.tail)
    else:
        target = _dense(framework, teacher, shape, axis, shards is not None, temperature)
    check_weights(framework, sample_weight, normalizer, rows, reduction)
    if vocabulary == 0 and shards is None:
        raise ValueError("there must be at least one class, got 0")
    options = Options(
        reduction,
        sample_weight=sample_weight,
        normalizer=normalizer,
        stats=check_stats(stats, DIVERGENCE_STATS),
        kind=kind,
        beta=beta,
        shift=shift,
    )
    return Call(source, target, divided(Activation(logit_scale, softcap), temperature), options, shards)


def _dense(framework: str, teacher: Any, shape: tuple[int, ...], axis: int, in_shards: bool, temperature: Any) -> Dense:
    """Check a teacher of all classes and return it with the temperature folded into its softcap and scale."""
    rows, vocabulary, ids = shape[:axis] + shape[axis + 1 :], shape[axis], None
    if isinstance(teacher, Subset):
        ids, teacher = teacher.ids, teacher.teacher
        check_dtype("teacher.ids", ids, INTEGER_DTYPES)
        if tuple(ids.shape) != (vocabulary,):
            raise ValueError(
                f"teacher.ids of a xent.Subset must have shape ({vocabulary},), the teacher's class of each class of "
                f"the student; got {shape_of(*ids.shape)}"
            )
    alike = "; with vocab_parallel student and teacher must be cut alike" if in_shards else ""
    source: Source
    if isinstance(teacher, LinearTeacher):
        check_classifier(framework, teacher.input, teacher.weight, teacher.bias, _NAMES_OF_TEACHER)
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
        cap, scale = check_numbers(framework, {"softcap": teacher.softcap, "logit_scale": teacher.logit_scale})
        activation, source = Activation(scale, cap), Product(teacher.input, teacher.weight, teacher.bias)
    else:
        check_dtype("teacher", teacher)
        found = tuple(teacher.shape)
        if found != shape and (ids is None or found[:axis] + found[axis + 1 :] != rows or len(found) != len(shape)):
            expected = shape if ids is None else shape_of(*rows[:axis], "V", *rows[axis:])
            raise ValueError(
                f"teacher must have shape {expected}, the student's rows and vocabulary; got {found}{alike}"
            )
        activation, source = Activation(), Given(teacher, axis)
    if framework == "numpy" and ids is not None:
        check_values(ids, source)
        ids, source = None, gathered(source, ids)
    return Dense(source, divided(activation, temperature), ids)


def _check_top_k(teacher: TopKTeacher, rows: tuple[int, ...], vocabulary: int) -> None:
    if teacher.tail not in TAILS:
        raise ValueError(f"teacher.tail must be one of {', '.join(map(repr, TAILS))}, got {shown(teacher.tail)}")
    check_dtype("teacher.ids", teacher.ids, INTEGER_DTYPES)
    check_dtype("teacher.log_probs", teacher.log_probs)
    shape = tuple(teacher.ids.shape)
    if shape[:-1] != rows or len(shape) != len(rows) + 1:
        raise ValueError(f"teacher.ids must have shape {shape_of(*rows, 'K')}, K classes for each row; got {shape}")
    if not 1 <= shape[-1] <= vocabulary:
        raise ValueError(f"teacher.ids must hold 1 to {vocabulary} classes a row, the vocabulary; got {shape[-1]}")
    check_shape(teacher.log_probs, shape, "teacher.log_probs must have the shape of teacher.ids, {}; got {}")


def check_values(ids: Any, source: Source) -> None:
    """Raise IndexError or ValueError for ids, of NumPy, that are no classes of the teacher or repeat."""
    size = vocabulary_of(source)
    outside = np.flatnonzero((ids < 0) | (ids >= size))
    if outside.size:
        place = outside[0]
        raise IndexError(f"teacher.ids[{place}] is {ids[place]}; the teacher's classes are 0 to {size - 1}")
    ordered = np.sort(ids)
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    if again.size:
        raise ValueError(f"teacher.ids of a xent.Subset must hold a class at most once, got {ordered[again[0]]} again")


def gathered(source: Source, ids: Any) -> Source:
    """Return the logits of these classes: columns of stored ones, or rows of the classifier."""
    if isinstance(source, Given):
        return replaced(source, logits=source.logits[(slice(None),) * source.axis + (ids,)])
    weight, bias = source.weight, source.bias
    if isinstance(weight, QuantizedWeight):
        parts: dict[str, Any] = {name: getattr(weight, name) for name in ("packed", "scales", "biases")}
        parts = {name: part if part is None else part[ids] for name, part in parts.items()}
        weight = replace(weight, **parts)
    else:
        weight = weight[ids]
    return replaced(source, weight=weight, bias=None if bias is None else bias[ids])
