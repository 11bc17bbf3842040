"""What is checked: every option alone and in the combinations that interact, as descriptions without a framework."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

__all__ = ["OPTIONS", "Case", "Inputs", "make_inputs", "option_cases"]

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
    """Added to all logits: large values that the loss must not feel."""
    target_dtype: str = "int64"
    workspace: int | None = None
    alone: bool = False
    """Whether the loss is also computed without gradients, which may take other kernels."""

    def __str__(self) -> str:
        shape = "x".join(map(str, (*self.rows, self.vocabulary)))
        return "-".join([self.function, shape, self.dtype, self.reduction, self.name])


@dataclass(frozen=True, eq=False)
class Inputs:
    """A case's arrays, in float64: what is differentiated, the target, options, the upstream gradient."""

    differentiable: dict[str, Any]
    target: Any
    options: dict[str, Any]
    upstream: Any


def option_cases(function: str, dtype: str) -> list[Case]:
    """Return every option and reduction at one middling shape."""
    base = Case(function, (4, 12), 67, dtype, "")
    named = [replace(base, name=name, options=options) for name, options in OPTIONS.items()]
    if function == "linear_cross_entropy":
        named += [
            replace(case, name=f"{case.name}, bias", bias=True) for case in named if case.name in ("plain", "all")
        ]
        shifted = ("plain", "all", "probabilities, all")
        named += [replace(case, name=f"{case.name}, shift", shift=2) for case in named if case.name in shifted]
    return [
        replace(case, reduction=reduction)
        for case in named
        for reduction in ("mean", "sum", "none")
        if reduction == "mean" or case.options.keys() != {"normalizer"}
    ]


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Draw a case's arrays. Nothing is symmetric or constant, so that a gradient in the wrong place shows."""
    rng = np.random.default_rng([seed, case.vocabulary, *case.rows])
    rows, vocabulary = case.rows, case.vocabulary
    differentiable: dict[str, Any]
    if case.function == "cross_entropy":
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
    return Inputs(differentiable, target, options, upstream)


def _long_span(rows: tuple[int, ...], share: float) -> Any:
    """Mark the first rows in one run, as a masked prompt is."""
    count = int(np.prod(rows))
    return (np.arange(count) < int(count * share / 2)).reshape(rows)
