"""`xent.Subset`: a teacher restricted to the classes that the student has. Its classes are gathered once a call."""

from dataclasses import replace
from typing import Any

import numpy as np

from xent.core.arrays import INTEGER_DTYPES, describe, dtype_name, framework_of, shape_of
from xent.core.call import Given, Source, replaced, vocabulary_of
from xent.core.spec import QuantizedWeight
from xent.core.teachers import LinearTeacher, Subset, TopKTeacher

__all__ = ["NO_SUBSET", "check_ids", "check_subset", "check_values", "gathered"]


NO_SUBSET = (
    "a xent.Subset does not go with vocab_parallel, because the classes that it selects are on other ranks: pass the "
    "whole classifiers, or a teacher of the student's classes that is cut like the student"
)


def check_subset(subset: Subset) -> None:
    """Raise TypeError or ValueError for a Subset of something else than logits or a `LinearTeacher`."""
    if isinstance(subset.teacher, TopKTeacher):
        raise ValueError(
            "a xent.Subset of a TopKTeacher is not possible: the teacher's probabilities of the student's classes that "
            "were not stored are unknown. Pass logits or a LinearTeacher, or store the K classes of the student's "
            "vocabulary"
        )
    if framework_of(subset.teacher) is None and not isinstance(subset.teacher, LinearTeacher):
        raise TypeError(
            f"the teacher of a xent.Subset must be an array of logits or a xent.LinearTeacher, got "
            f"{describe(subset.teacher)}"
        )


def check_ids(ids: Any, vocabulary: int) -> None:
    """Raise TypeError or ValueError for ids that do not name one class of the teacher for each of the student."""
    if dtype_name(ids) not in INTEGER_DTYPES:
        raise TypeError(f"teacher.ids must have an integer dtype, got {describe(ids)}")
    if tuple(ids.shape) != (vocabulary,):
        raise ValueError(
            f"teacher.ids of a xent.Subset must have shape ({vocabulary},), the teacher's class of each class of the "
            f"student; got {shape_of(*ids.shape)}"
        )


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
