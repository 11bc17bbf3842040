"""Validate the arguments of a divergence and describe the call. Errors name the argument and what is allowed.

This module checks shapes, dtypes and numbers. The backends check the values in a `TopKTeacher`.
"""

import math
from typing import Any

from xent.core.arrays import INTEGER_DTYPES, describe, dtype_name, framework_of, is_tracing, number_of, one_framework
from xent.core.spec import DIVERGENCE_STATS, bounded
from xent.core.teachers import TAILS, DivergenceCall, LinearLogits, LinearTeacher, StoredLogits, TopKTeacher
from xent.core.validate_arrays import (
    check_classifier,
    check_float,
    check_normalizer,
    check_sample_weight,
    class_axis,
    parts_of,
)
from xent.core.validate_options import (
    check_number,
    check_numbers,
    check_reduction,
    check_shift_and_workspace,
    check_stats,
)

__all__ = ["check_beta", "check_temperature", "linear_divergence_call", "logits_divergence_call"]

_NO_REVERSE = (
    "beta must be 0 with a TopKTeacher, got {!r}: KL(p || q) and mixtures need the teacher's probability of every "
    "class that the student gives mass to, and a top-k teacher has K of them. Pass logits or a LinearTeacher"
)

_NAMES_OF_TEACHER = ("teacher.input", "teacher.weight", "teacher.bias")


def logits_divergence_call(
    logits: Any,
    teacher: Any,
    *,
    axis: int,
    sample_weight: Any,
    normalizer: Any,
    beta: Any,
    temperature: Any,
    softcap: Any,
    logit_scale: Any,
    reduction: Any,
    stats: Any = (),
) -> DivergenceCall:
    """Check the arguments of `xent.divergence` and describe the call."""
    framework, normalizer = _frameworks({"logits": logits}, teacher, sample_weight, normalizer)
    axis, shape = class_axis(logits, axis), tuple(logits.shape)
    rows, vocabulary, reduction = shape[:axis] + shape[axis + 1 :], shape[axis], check_reduction(reduction)
    cap, scale, heat = _numbers(framework, beta, temperature, softcap, logit_scale)
    return DivergenceCall(
        StoredLogits(logits, cap, scale),
        _teacher(framework, teacher, rows, vocabulary, shape, heat, beta),
        check_sample_weight(sample_weight, rows),
        check_normalizer(framework, normalizer, reduction),
        number_of(framework, beta),
        reduction,
        rows,
        _vocabulary(vocabulary),
        heat,
        axis,
        stats=check_stats(stats, DIVERGENCE_STATS),
    )


def linear_divergence_call(
    input: Any,
    linear_weight: Any,
    teacher: Any,
    *,
    linear_bias: Any,
    workspace: int | None,
    sample_weight: Any,
    normalizer: Any,
    beta: Any,
    temperature: Any,
    softcap: Any,
    logit_scale: Any,
    reduction: Any,
    stats: Any = (),
) -> DivergenceCall:
    """Check the arguments of `xent.linear_divergence` and describe the call."""
    student = {"input": input, **parts_of(linear_weight, "linear_weight"), "linear_bias": linear_bias}
    framework, normalizer = _frameworks(student, teacher, sample_weight, normalizer)
    check_classifier(framework, input, linear_weight, linear_bias)
    check_shift_and_workspace(0, workspace)
    check_reduction(reduction)
    rows, vocabulary = tuple(input.shape[:-1]), linear_weight.shape[0]
    cap, scale, heat = _numbers(framework, beta, temperature, softcap, logit_scale)
    return DivergenceCall(
        LinearLogits(input, linear_weight, linear_bias, cap, scale),
        _teacher(framework, teacher, rows, vocabulary, (*rows, vocabulary), heat, beta),
        check_sample_weight(sample_weight, rows),
        check_normalizer(framework, normalizer, reduction),
        number_of(framework, beta),
        reduction,
        rows,
        _vocabulary(vocabulary),
        heat,
        len(rows),
        workspace,
        check_stats(stats, DIVERGENCE_STATS),
    )


def check_beta(beta: Any) -> None:
    """Raise TypeError or ValueError for a beta that is not a number in [0, 1]."""
    check_number("beta", beta, "in [0, 1]", lambda value: 0 <= value <= 1)


def check_temperature(temperature: Any) -> None:
    """Raise TypeError or ValueError for a temperature that is not a number above 0."""
    check_number("temperature", temperature, "finite and > 0", lambda value: 0 < value < math.inf)


def _frameworks(student: dict[str, Any], teacher: Any, sample_weight: Any, normalizer: Any) -> tuple[str, Any]:
    """Return the framework of all arrays, and the normalizer as a Python number or an array."""
    normalizer = number_of(framework_of(next(iter(student.values()))), normalizer)
    others = {"sample_weight": sample_weight, "normalizer": normalizer}
    return one_framework(**student, **_arrays_of(teacher), **others), normalizer


def _arrays_of(teacher: Any) -> dict[str, Any]:
    """Return a teacher's arrays, by the names that error messages use."""
    if isinstance(teacher, TopKTeacher):
        named = {"teacher.ids": teacher.ids, "teacher.log_probs": teacher.log_probs}
    elif isinstance(teacher, LinearTeacher):
        named = {"teacher.input": teacher.input, **parts_of(teacher.weight, "teacher.weight")}
        optional = {"teacher.bias": teacher.bias, "teacher.weight.biases": named.pop("teacher.weight.biases", None)}
        named |= {name: array for name, array in optional.items() if array is not None}
    elif framework_of(teacher) is None:
        raise TypeError(
            f"teacher must be an array of logits, a xent.LinearTeacher or a xent.TopKTeacher, got {describe(teacher)}"
        )
    else:
        named = {"teacher": teacher}
    for name, array in named.items():
        if framework_of(array) is None:
            raise TypeError(f"{name} must be a torch, MLX or NumPy array, got {describe(array)}")
    return named


def _numbers(
    framework: str, beta: Any, temperature: Any, softcap: Any, logit_scale: Any
) -> tuple[float | None, float, float]:
    """Return the student's softcap and scale, with the temperature folded in, and the temperature."""
    beta, heat, cap, scale = (number_of(framework, value) for value in (beta, temperature, softcap, logit_scale))
    if not is_tracing(framework):
        check_beta(beta)
        check_temperature(heat)
        check_numbers(0.0, 0.0, cap, scale, None)
    cap, heat = bounded(cap), bounded(heat)
    return None if cap is None else cap / heat, scale / heat, heat


def _teacher(
    framework: str,
    teacher: Any,
    rows: tuple[int, ...],
    vocabulary: int,
    logits_shape: tuple[int, ...],
    heat: float,
    beta: Any,
) -> StoredLogits | LinearLogits | TopKTeacher:
    """Check a teacher and return it with the temperature folded into its softcap and scale."""
    if isinstance(teacher, TopKTeacher):
        _check_top_k(teacher, rows, vocabulary)
        if not is_tracing(framework) and beta != 0:
            raise ValueError(_NO_REVERSE.format(beta))
        return teacher
    if isinstance(teacher, LinearTeacher):
        check_classifier(framework, teacher.input, teacher.weight, teacher.bias, _NAMES_OF_TEACHER)
        if teacher.weight.shape[0] != vocabulary:
            raise ValueError(
                f"teacher.weight must have {vocabulary} rows, the student's vocabulary, got {teacher.weight.shape[0]}: "
                "a divergence compares distributions over the same classes"
            )
        if tuple(teacher.input.shape[:-1]) != rows:
            raise ValueError(
                f"teacher.input must have shape {(*rows, 'D')}, a hidden state for each row of the student; got "
                f"{tuple(teacher.input.shape)}"
            )
        cap, scale = (number_of(framework, value) for value in (teacher.softcap, teacher.logit_scale))
        if not is_tracing(framework):
            check_numbers(0.0, 0.0, cap, scale, None)
        cap = None if cap is None else bounded(cap) / heat
        return LinearLogits(teacher.input, teacher.weight, teacher.bias, cap, scale / heat)
    check_float("teacher", teacher)
    if tuple(teacher.shape) != logits_shape:
        raise ValueError(
            f"teacher logits must have shape {logits_shape}, the student's rows and vocabulary; got "
            f"{tuple(teacher.shape)}"
        )
    return StoredLogits(teacher, None, 1 / heat)


def _check_top_k(teacher: TopKTeacher, rows: tuple[int, ...], vocabulary: int) -> None:
    if teacher.tail not in TAILS:
        raise ValueError(f"teacher.tail must be one of {', '.join(map(repr, TAILS))}, got {teacher.tail!r}")
    if dtype_name(teacher.ids) not in INTEGER_DTYPES:
        raise TypeError(f"teacher.ids must have an integer dtype, got {describe(teacher.ids)}")
    check_float("teacher.log_probs", teacher.log_probs)
    shape = tuple(teacher.ids.shape)
    if shape[:-1] != rows or len(shape) != len(rows) + 1:
        raise ValueError(f"teacher.ids must have shape {(*rows, 'K')}, K classes for each row; got {shape}")
    if not 1 <= shape[-1] <= vocabulary:
        raise ValueError(f"teacher.ids must hold 1 to {vocabulary} classes a row, the vocabulary; got {shape[-1]}")
    if tuple(teacher.log_probs.shape) != shape:
        raise ValueError(
            f"teacher.log_probs must have the shape of teacher.ids, {shape}; got {tuple(teacher.log_probs.shape)}"
        )


def _vocabulary(vocabulary: int) -> int:
    if vocabulary == 0:
        raise ValueError("there must be at least one class, got 0")
    return vocabulary
