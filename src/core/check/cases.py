"""The cases of the gradient checks: every option alone, and combinations of options that interact.

Cases are descriptions that use no framework.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xent.core.spec import DIFFERENTIABLE, Support

__all__ = ["LOG_PROB_OPTIONS", "LOSSES", "OPTIONS", "Case", "Inputs", "make_inputs", "option_cases"]

LOSSES = ("cross_entropy", "linear_cross_entropy")
"""The functions that return a loss; the others return log-probabilities."""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight": {"weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing, all of it": {"label_smoothing": 1.0},
    "z_loss": {"z_loss": 0.02},
    "softcap": {"softcap": 4.0},
    "scale": {"logit_scale": 0.5},
    "scale, negative": {"logit_scale": -0.7},
    "sample_weight": {"sample_weight": True},
    "normalizer": {"normalizer": 13.5},
    "normalizer, array": {"normalizer": "array"},
    "ignore_index, a class": {"ignore_index": 2},
    "weight, smoothing": {"weight": True, "label_smoothing": 0.2},
    "weight, sample_weight": {"weight": True, "sample_weight": True},
    "softcap, scale": {"softcap": 3.0, "logit_scale": 1.5},
    "softcap, z_loss": {"softcap": 3.0, "z_loss": 0.05},
    "smoothing, z_loss": {"label_smoothing": 0.1, "z_loss": 0.05},
    "all": {
        "weight": True,
        "label_smoothing": 0.1,
        "z_loss": 0.02,
        "softcap": 5.0,
        "logit_scale": 0.8,
        "sample_weight": True,
        "normalizer": 21.0,
    },
    "probabilities": {"probabilities": True},
    "probabilities, smoothing": {"probabilities": True, "label_smoothing": 0.1},
    "probabilities, all": {
        "probabilities": True,
        "weight": True,
        "label_smoothing": 0.1,
        "z_loss": 0.02,
        "softcap": 5.0,
        "logit_scale": 0.8,
        "sample_weight": True,
    },
}

LOG_PROB_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "temperature of each row": {"temperature": "rows"},
    "softcap, temperature of each row": {"softcap": 3.0, "temperature": "rows"},
    "scale, negative, temperature": {"logit_scale": -0.7, "temperature": 1.6},
    "softcap, scale": {"softcap": 3.0, "logit_scale": 1.5},
    "ignore_index, a class": {"ignore_index": 2},
    "support": {"support": True},
    "all": {"temperature": "rows", "softcap": 5.0, "logit_scale": 0.8, "support": True},
}


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
    options: dict[str, Any] = field(default_factory=dict)
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
    """Differentiable statistics. Each gets an upstream gradient of its own."""
    missing: tuple[str, ...] = ()
    """Differentiable results that get no upstream gradient in this case."""
    trained: bool = False
    """Whether the target, which must be class probabilities, gets a gradient too."""

    def __str__(self) -> str:
        shape = "x".join(map(str, (*self.rows, self.vocabulary)))
        return "-".join([self.function, shape, self.dtype, self.reduction, self.name])

    @property
    def is_linear(self) -> bool:
        """Whether the call takes hidden states and a classifier."""
        return self.function.startswith("linear_")

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the differentiable results, in the order in which the call returns them."""
        if self.function in LOSSES:
            return ("loss", *self.stats)
        return ("log_probs", *(("entropy",) if self.entropy else ()), *self.stats)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the call other than arrays and options."""
        asked = {"reduction": self.reduction} if self.function in LOSSES else {"entropy": self.entropy}
        loop = {"shift": self.shift, "workspace": self.workspace} if self.is_linear else {}
        return {**asked, **loop, "stats": self.stats}

    def found_in(self, returned: Any) -> dict[str, Any]:
        """Return the values of `results` by name, from the return value of the call."""
        parts = returned if isinstance(returned, tuple) else (returned,)
        found = dict(zip(self.results[: len(self.results) - len(self.stats)], parts, strict=False))
        return found | {name: getattr(parts[-1], name) for name in self.stats}


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arrays of a case in float64: differentiable arrays, target, options and upstream gradients.

    `upstream` is the gradient of the first result. `others` has those of the other results, except for names in
    `missing`.
    """

    differentiable: dict[str, Any]
    target: Any
    options: dict[str, Any]
    upstream: Any
    others: dict[str, Any]


def option_cases(function: str, dtype: str) -> list[Case]:
    """Return a case for every option, for losses with every reduction, with one medium-sized shape."""
    base = Case(function, (4, 12), 67, dtype, "")
    if function not in LOSSES:
        return _log_prob_cases(replace(base, reduction="none"))
    named = [replace(base, name=name, options=options) for name, options in OPTIONS.items()]
    if function == "linear_cross_entropy":
        named += [
            replace(case, name=f"{case.name}, bias", bias=True) for case in named if case.name in ("plain", "all")
        ]
        shifted = ("plain", "all", "probabilities, all")
        named += [replace(case, name=f"{case.name}, shift", shift=2) for case in named if case.name in shifted]
    reduced = [
        replace(case, reduction=reduction)
        for case in named
        for reduction in ("mean", "sum", "none")
        if reduction == "mean" or case.options.keys() != {"normalizer"}
    ]
    reported = [
        replace(case, name=f"{case.name}, statistics", reduction="none", stats=DIFFERENTIABLE)
        for case in named
        if case.name in ("all", "probabilities, all")
    ]
    trained = [
        replace(case, name=f"{case.name}, trained", trained=True)
        for case in reduced + reported
        if case.name.startswith("probabilities")
    ]
    return reduced + reported + trained


def _log_prob_cases(base: Case) -> list[Case]:
    both = replace(base, entropy=True)
    named = [replace(both, name=name, options=options) for name, options in LOG_PROB_OPTIONS.items()]
    every = replace(named[-1], stats=("lse",))
    named += [
        replace(base, name="without entropy"),
        replace(every, name="all, lse"),
        replace(every, name="all, of the entropy alone", missing=("log_probs", "lse")),
        replace(every, name="all, of the log-probabilities alone", missing=("entropy", "lse")),
    ]
    if base.is_linear:
        named += [replace(every, name="all, bias, shift", bias=True, shift=2)]
    return named


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Draw the arrays of a case. No array is symmetric or constant, so that a gradient in a wrong place is detected."""
    rng = np.random.default_rng([seed, case.vocabulary, *case.rows])
    rows, vocabulary = case.rows, case.vocabulary
    differentiable: dict[str, Any]
    if not case.is_linear:
        differentiable = {"logits": rng.normal(0, 2, (*rows, vocabulary)) + case.offset}
    else:
        differentiable = {
            "input": rng.normal(0, 1, (*rows, case.hidden)),
            "linear_weight": rng.normal(0, 2 / case.hidden**0.5, (vocabulary, case.hidden)),
        }
        if case.bias:
            differentiable["linear_bias"] = rng.normal(0, 1, vocabulary) + case.offset
    options = dict(case.options)
    if case.reduction != "mean":
        options.pop("normalizer", None)
    target: Any
    if options.pop("probabilities", False):
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
    if options.get("normalizer") == "array":
        options["normalizer"] = np.array(17.25)
    upstream = rng.normal(0, 1, rows if case.reduction == "none" else ())
    if case.reduction == "none":
        upstream = np.where(_long_span(rows, 0.2), 0.0, upstream)
    if options.get("temperature") == "rows":
        options["temperature"] = np.asarray(rng.uniform(0.5, 1.6, rows))
    if options.pop("support", False):
        options["support"] = _draw_support(rng, target, vocabulary)
    first, *rest = case.results
    others = {name: np.asarray(rng.normal(0, 1, rows)) for name in rest}
    others = {name: values for name, values in others.items() if name not in case.missing}
    return Inputs(differentiable, target, options, None if first in case.missing else upstream, others)


def _draw_support(rng: np.random.Generator, target: Any, vocabulary: int) -> Support:
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


def _long_span(rows: tuple[int, ...], share: float) -> Any:
    """Return a mask of one run of rows at the beginning, like a masked prompt."""
    count = int(np.prod(rows))
    return (np.arange(count) < int(count * share / 2)).reshape(rows)
