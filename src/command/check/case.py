"""One call to check: its description, which uses no framework, and the float64 arrays drawn for it."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xent.command.check.harness import Harness, Operand
from xent.core.spec import LinearTeacher, Support, TopKTeacher

__all__ = ["LOSSES", "Array", "Case", "Inputs", "Named", "make_inputs", "mapped", "placed"]

Array = NDArray[Any]
Named = dict[str, Any]
"""Arrays and options by their names."""

LOSSES = ("cross_entropy", "linear_cross_entropy")
"""The functions that return the loss of a target; the others return log-probabilities or divergences."""


@dataclass(frozen=True)
class Case:
    """One call to check. Options whose value is an array are flags here (`weight`, `sample_weight`, `bias`).

    A `normalizer` among the options is passed with reduction "mean" alone: the others refuse it.
    """

    function: str
    rows: tuple[int, ...]
    vocabulary: int
    dtype: str
    name: str
    options: Named = field(default_factory=dict)
    reduction: str = "mean"
    hidden: int = 24
    bias: bool = False
    shift: int = 0
    ignored: float = 0.3
    offset: float = 0.0
    """A constant that is added to all logits. The loss must not depend on it, even if it is large."""
    target_dtype: str = "int64"
    workspace: int | None = None
    alone: bool = False
    """Whether the results are also computed without gradients, which may use other kernels."""
    entropy: bool = False
    """Whether a log-probability function also returns the entropy."""
    stats: tuple[str, ...] = ()
    """Differentiable statistics, each with an upstream gradient of its own; or the entropy of a divergence."""
    missing: tuple[str, ...] = ()
    """Results that get no upstream gradient in this case."""
    trained: bool = False
    """Whether the target, which must be class probabilities, gets a gradient too."""
    teacher: str = "logits"
    """Of a divergence: stored "logits"; "linear"; or K classes with the tail "bucket", "renormalize" or "drop"."""
    teacher_hidden: int = 40
    classes: int = 7
    """K of a top-k teacher."""
    apart: float = 1.0
    """Scale of the difference between teacher and student logits. The student's logits have standard deviation 2."""
    teacher_softcap: float | None = None
    teacher_scale: float = 1.0

    def __str__(self) -> str:
        shape = "x".join(map(str, (*self.rows, self.vocabulary)))
        teacher = [self.teacher] if self.is_divergence else []
        return "-".join([self.function, shape, self.dtype, *teacher, self.reduction, self.name])

    @property
    def is_linear(self) -> bool:
        """Whether the call takes hidden states and a classifier."""
        return self.function.startswith("linear_")

    @property
    def is_divergence(self) -> bool:
        """Whether the call takes a teacher instead of a target."""
        return self.function.endswith("divergence")

    @property
    def wide(self) -> str:
        """The dtype of results, of upstream gradients and of options that are arrays."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def target(self) -> str:
        """The name of the argument that the call compares with."""
        return "teacher" if self.is_divergence else "target"

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results, in the order in which the call returns them."""
        if self.function.endswith("log_probs"):
            return ("log_probs", *(("entropy",) if self.entropy else ()), *self.stats)
        return ("loss", *self.stats)

    @property
    def keywords(self) -> Named:
        """The keyword arguments of the call other than arrays and options."""
        of_rows = self.function.endswith("log_probs")
        keywords: Named = {"entropy": self.entropy} if of_rows else {"reduction": self.reduction}
        if self.is_linear:
            keywords |= {"shift": self.shift, "workspace": self.workspace}
        return keywords | {"stats": self.stats}

    def results_in(self, returned: Any) -> Named:
        """Return the values of `results` by name, from the return value of the call."""
        parts = returned if isinstance(returned, tuple) else (returned,)
        results = dict(zip(self.results[: len(self.results) - len(self.stats)], parts, strict=False))
        return results | {name: getattr(parts[-1], name) for name in self.stats}


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arrays of a case in float64: differentiable arrays, target or teacher, options and upstream gradients.

    `upstream` is the gradient of the first result. `others` has those of the other results, except for names in
    `missing`.
    """

    differentiable: dict[str, Array]
    target: Any
    options: Named
    upstream: Array | None
    others: dict[str, Array]


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Draw the arrays of a case. No array is symmetric or constant, so that a gradient in a wrong place is detected."""
    rng = np.random.default_rng([seed, case.vocabulary, *case.rows])
    rows, vocabulary, options = case.rows, case.vocabulary, dict(case.options)
    differentiable, logits = _sources(case, rng)
    target: Any = None
    if case.is_divergence:  # with tail "drop" the value of close distributions can cancel to rounding errors
        logits = logits + rng.normal(0, max(case.apart, 1.0 if case.teacher == "drop" else 0.0), logits.shape)
    elif options.pop("probabilities", False):
        target = rng.dirichlet(np.full(vocabulary, 0.3), rows)
    else:
        target = rng.integers(0, vocabulary, rows)
        ignored = rng.random(rows) < case.ignored
        ignored |= _long_span(rows, case.ignored)
        target = np.where(ignored, options.get("ignore_index", -100), target).astype(case.target_dtype)
    if options.pop("weight", False):
        options["weight"] = rng.uniform(0.2, 2.0, vocabulary)
        options["weight"][:: max(vocabulary // 5, 2)] = 0.0
    if options.pop("sample_weight", False):
        options["sample_weight"] = np.asarray(rng.uniform(0.1, 2.0, rows) * (rng.random(rows) < 0.8))
    if case.reduction != "mean":
        options.pop("normalizer", None)
    elif options.get("normalizer") == "array":
        options["normalizer"] = np.array(17.25)
    upstream = rng.normal(0, 1, rows if case.reduction == "none" else ())
    if case.reduction == "none":
        upstream = np.where(_long_span(rows, 0.2), 0.0, upstream)
    if options.get("temperature") == "rows":
        options["temperature"] = np.asarray(rng.uniform(0.5, 1.6, rows))
    if options.pop("support", False):
        options["support"] = _draw_support(rng, target, vocabulary)
    if case.is_divergence:
        target = _draw_teacher(case, logits, options.get("temperature", 1.0), rng)
    first, *rest = case.results
    others = {name: np.asarray(rng.normal(0, 1, rows)) for name in rest}
    others = {name: gradient for name, gradient in others.items() if name not in case.missing}
    return Inputs(differentiable, target, options, None if first in case.missing else upstream, others)


def _sources(case: Case, rng: np.random.Generator) -> tuple[dict[str, Array], Any]:
    """Draw the differentiable arrays. Return them and the logits."""
    if not case.is_linear:
        logits = rng.normal(0, 2, (*case.rows, case.vocabulary)) + case.offset
        return {"logits": logits}, logits
    hidden = rng.normal(0, 1, (*case.rows, case.hidden))
    weight = rng.normal(0, 2 / case.hidden**0.5, (case.vocabulary, case.hidden))
    arrays = {"input": hidden, "linear_weight": weight}
    if case.bias:
        arrays["linear_bias"] = rng.normal(0, 1, case.vocabulary) + case.offset
    return arrays, hidden @ weight.T + arrays.get("linear_bias", 0) if case.is_divergence else None


def _draw_teacher(
    case: Case, logits: Array, temperature: float, rng: np.random.Generator
) -> Array | LinearTeacher | TopKTeacher:
    """Draw a teacher. Stored logits are the student's plus noise, so that the two can be close."""
    if case.teacher == "logits":
        return logits
    if case.teacher == "linear":
        width = case.teacher_hidden
        hidden = rng.normal(0, 1, (*case.rows, width))
        weight = rng.normal(0, 2 * case.apart / width**0.5, (case.vocabulary, width))
        bias = rng.normal(0, 1, case.vocabulary) if case.bias else None
        return LinearTeacher(hidden, weight, bias, case.teacher_softcap, case.teacher_scale)
    x = logits / temperature
    log_q = x - np.logaddexp.reduce(x, axis=-1, keepdims=True) if x.size else x
    ids = np.argsort(-log_q, -1)[..., : case.classes]
    ids = np.take_along_axis(ids, rng.permuted(np.broadcast_to(np.arange(case.classes), ids.shape), axis=-1), -1)
    log_probs = np.take_along_axis(log_q, ids, -1)
    if case.classes > 2:  # some rows have one class less; the padding entry has an arbitrary id
        short = np.arange(int(np.prod(case.rows))).reshape(case.rows) % 4 == 3
        log_probs[..., -1] = np.where(short, -np.inf, log_probs[..., -1])
        ids[..., -1] = np.where(short, ids[..., 0], ids[..., -1])
    return TopKTeacher(ids, log_probs, case.teacher)


def _draw_support(rng: np.random.Generator, target: Array, vocabulary: int) -> Support:
    """Draw a support for each row.

    The support of the last row with a target excludes the target. If the first row has no target, its support is empty.
    """
    sets = []
    counts = (target.ravel() >= 0) & (target.ravel() < vocabulary)
    last = counts.size - 1 - counts[::-1].argmax() if counts.any() else -1
    for row, chosen in enumerate(target.ravel()):
        taken = rng.permutation(vocabulary)[: rng.integers(2, vocabulary + 2)]
        if not counts[row]:
            taken = taken[: 0 if row == 0 else None]
        elif row == last and vocabulary > 1:
            taken = taken[taken != chosen]
        else:
            taken = rng.permutation(np.union1d(taken[: None if row % 5 else 0], chosen))
        sets.append(taken)
    ids = np.concatenate(sets) if sets else np.zeros(0)
    return Support(ids.astype(np.int64), np.cumsum([0, *map(len, sets)]))


def _long_span(rows: tuple[int, ...], share: float) -> Array:
    """Return a mask of one run of rows at the beginning, like a masked prompt."""
    count = int(np.prod(rows))
    return (np.arange(count) < int(count * share / 2)).reshape(rows)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each array of a value: a dict, a support, a teacher, an array or a number."""
    if isinstance(value, dict):
        return {name: mapped(function, part) for name, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{attribute.name: mapped(function, getattr(value, attribute.name)) for attribute in fields(value)}
        )
    return function(value) if hasattr(value, "shape") and not np.isscalar(value) else value


def placed(harness: Harness[Operand], value: Any, dtype: str) -> Any:
    """Return a value with its NumPy arrays on the harness's device, those of floats as `dtype`."""
    return mapped(lambda array: harness.array(array, dtype if array.dtype.kind == "f" else None), value)
