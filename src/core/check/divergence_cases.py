"""The cases of the gradient checks of divergences: every teacher with every option.

Cases are descriptions that use no framework.
"""

from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np

__all__ = ["TEACHERS", "DivergenceCase", "DivergenceInputs", "divergence_cases", "make_divergence_inputs"]

TEACHERS = ("logits", "linear", "bucket", "renormalize", "drop")
"""Kinds of teachers: stored logits, hidden states and a classifier, and the K most probable classes with each tail."""
_TOP_K = TEACHERS[2:]
_REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class DivergenceCase:
    """One call to check. Options whose value is an array are flags here (`sample_weight`, `bias`)."""

    function: str
    rows: tuple[int, ...]
    vocabulary: int
    dtype: str
    name: str
    teacher: str = "logits"
    options: dict[str, Any] = field(default_factory=dict)
    reduction: str = "mean"
    hidden: int = 24
    teacher_hidden: int = 40
    bias: bool = False
    classes: int = 7
    """K of a top-k teacher."""
    apart: float = 1.0
    """Scale of the difference between teacher and student logits. The student's logits have standard deviation 2."""
    teacher_softcap: float | None = None
    teacher_scale: float = 1.0
    workspace: int | None = None
    entropy: bool = False
    """Whether the student's entropy is requested."""

    def __str__(self) -> str:
        shape = "x".join(map(str, (*self.rows, self.vocabulary)))
        return "-".join([self.function, shape, self.dtype, self.teacher, self.reduction, self.name])


@dataclass(frozen=True, eq=False)
class DivergenceInputs:
    """The arrays of a case in float64: differentiable arrays, the teacher's, options, upstream gradient."""

    differentiable: dict[str, Any]
    teacher: dict[str, Any]
    """"teacher"; or "input", "weight" and perhaps "bias"; or "ids" and "log_probs"."""
    options: dict[str, Any]
    upstream: Any


def divergence_cases(function: str, dtype: str) -> list[DivergenceCase]:
    """Return a case for each teacher with every option and shape. Reductions and betas alternate over the cases."""
    betas, reductions = cycle((0.0, 1.0, 0.5, 0.1)), cycle(_REDUCTIONS)
    base = DivergenceCase(function, (3, 7), 67, dtype, "plain")
    cases: list[DivergenceCase] = []
    # The reference rounds in float64 too. A divergence is a difference of terms, and the closer the distributions are,
    # the larger these terms are compared with it. So float64 cases are less close.
    for teacher in TEACHERS:
        named = [
            base,
            replace(base, name="temperature", options={"temperature": 2.5}),
            replace(base, name="softcap, scale", options={"softcap": 3.0, "logit_scale": 1.5}),
            replace(base, name="weights", options={"sample_weight": True}),
            replace(base, name="weights, normalizer", options={"sample_weight": True, "normalizer": 13.5}),
            replace(base, name="close", apart=0.1 if dtype == "float64" else 0.01),
            replace(base, name="far", apart=6.0 if dtype == "float64" else 15.0),
            replace(base, name="every class known", vocabulary=33, classes=33),
            replace(base, name="a long row", rows=(3,), vocabulary=3001, classes=64, hidden=8),
            replace(base, name="no rows", rows=(0,)),
        ]
        if teacher not in _TOP_K:  # with one class, a top-k loss consists of rounding errors only
            named.append(replace(base, name="one class", vocabulary=1))
        if teacher != "drop":  # its value would be only the log p of a nearly certain class
            named.append(replace(base, name="two classes", vocabulary=2, classes=1, apart=4.0))
        if teacher == "linear":
            named.append(replace(base, name="capped teacher", teacher_softcap=4.0, teacher_scale=0.7))
        if function == "linear_divergence":
            named.append(replace(base, name="bias", bias=True))
            named.append(
                replace(base, name="chunks", workspace=base.vocabulary * 8 * 5, options={"sample_weight": True})
            )
        for case in named:
            reduction = "mean" if "normalizer" in case.options else next(reductions)
            case = replace(case, teacher=teacher, reduction=reduction, entropy=len(cases) % 2 == 0)
            cases.append(case if teacher in _TOP_K else _with(case, beta=next(betas)))
    plain = [replace(base, name=f"plain, beta {beta}", options={"beta": beta}) for beta in (0.0, 1.0, 0.5)]
    return cases + [replace(case, reduction=reduction) for case in plain for reduction in _REDUCTIONS]


def _with(case: DivergenceCase, **options: Any) -> DivergenceCase:
    return replace(case, options=case.options | options)


def make_divergence_inputs(case: DivergenceCase, seed: int = 0) -> DivergenceInputs:
    """Draw the arrays of a case. The teacher's logits are the student's plus noise, so that the two can be close."""
    rng = np.random.default_rng([seed, case.vocabulary, *case.rows])
    rows, vocabulary = case.rows, case.vocabulary
    differentiable: dict[str, Any]
    if case.function == "divergence":
        logits = rng.normal(0, 2, (*rows, vocabulary))
        differentiable = {"logits": logits}
    else:
        differentiable = {
            "input": rng.normal(0, 1, (*rows, case.hidden)),
            "linear_weight": rng.normal(0, 2 / case.hidden**0.5, (vocabulary, case.hidden)),
        }
        logits = differentiable["input"] @ differentiable["linear_weight"].T
        if case.bias:
            differentiable["linear_bias"] = rng.normal(0, 1, vocabulary)
            logits = logits + differentiable["linear_bias"]
    # With tail "drop" the value can cancel to rounding errors if the distributions are close.
    apart = max(case.apart, 1.0) if case.teacher == "drop" else case.apart
    near = logits + rng.normal(0, apart, logits.shape)
    options = dict(case.options)
    if options.pop("sample_weight", False):
        options["sample_weight"] = np.asarray(rng.uniform(0.1, 2.0, rows) * (rng.random(rows) < 0.7))
    upstream = rng.normal(0, 1, rows if case.reduction == "none" else ())
    if case.reduction == "none":
        upstream = np.where(_first(rows), 0.0, upstream)
    return DivergenceInputs(differentiable, _teacher(case, near, options, rng), options, upstream)


def _first(rows: tuple[int, ...]) -> Any:
    """Return a mask of the first fifth of the rows."""
    count = int(np.prod(rows))
    return (np.arange(count) < count // 5).reshape(rows)


def _teacher(case: DivergenceCase, logits: Any, options: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if case.teacher == "logits":
        return {"teacher": logits}
    if case.teacher == "linear":
        width = case.teacher_hidden
        made = {
            "input": rng.normal(0, 1, (*case.rows, width)),
            "weight": rng.normal(0, 2 * case.apart / width**0.5, (case.vocabulary, width)),
        }
        return made | ({"bias": rng.normal(0, 1, case.vocabulary)} if case.bias else {})
    x = logits / options.get("temperature", 1.0)
    log_q = x - np.logaddexp.reduce(x, axis=-1, keepdims=True) if x.size else x
    ids = np.argsort(-log_q, -1)[..., : case.classes]
    ids = np.take_along_axis(ids, rng.permuted(np.broadcast_to(np.arange(case.classes), ids.shape), axis=-1), -1)
    log_probs = np.take_along_axis(log_q, ids, -1)
    if case.classes > 2:  # some rows have one class less; the padding entry has an arbitrary id
        short = np.arange(int(np.prod(case.rows))).reshape(case.rows) % 4 == 3
        log_probs[..., -1] = np.where(short, -np.inf, log_probs[..., -1])
        ids[..., -1] = np.where(short, ids[..., 0], ids[..., -1])
    return {"ids": ids, "log_probs": log_probs}
