"""The cases of divergences: every teacher with every option by name, and covering sets of every two options."""

from dataclasses import replace
from itertools import cycle
from typing import Any

from tests.covering import FULL, covering
from xent.command.check.case import Case

__all__ = ["TEACHERS", "covering_divergences", "divergence_cases"]

TEACHERS = ("logits", "linear", "bucket", "renormalize", "drop")
"""Kinds of teachers: stored logits, hidden states and a classifier, and the K most probable classes with each tail."""
_TOP_K = TEACHERS[2:]
_REDUCTIONS = ("mean", "sum", "none")


def divergence_cases(function: str, dtype: str) -> list[Case]:
    """Return a case for each teacher with every option and shape. Reductions and betas alternate over the cases."""
    betas, reductions = cycle((0.0, 1.0, 0.5, 0.1)), cycle(_REDUCTIONS)
    base = Case(function, (3, 7), 67, dtype, "plain")
    cases = []
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
            asked = ("entropy",) if len(cases) % 2 == 0 else ()
            case = replace(case, teacher=teacher, reduction=reduction, stats=asked, missing=asked)
            cases.append(case if teacher in _TOP_K else _with(case, beta=next(betas)))
    plain = [replace(base, name=f"plain, beta {beta}", options={"beta": beta}) for beta in (0.0, 1.0, 0.5)]
    cases += [replace(case, reduction=reduction) for case in plain for reduction in _REDUCTIONS]
    variation = [
        replace(base, name="total variation", teacher=teacher, reduction=next(reductions), options={"kind": "tv"})
        for teacher in TEACHERS
        if teacher != "drop"
    ]
    far = [replace(case, name=f"{case.name}, far", apart=6.0, vocabulary=1501, hidden=8) for case in variation[:3]]
    return cases + variation + far


def _with(case: Case, **options: Any) -> Case:
    return replace(case, options=case.options | options)


FACTORS: dict[str, tuple[Any, ...]] = {
    "teacher": TEACHERS,
    "beta": (0.0, 1.0, 0.5, 0.9, "tv"),
    "temperature": (1.0, 0.6, 3.0),
    "softcap": (None, 4.0),
    "logit_scale": (1.0, -0.7),
    "reduction": ("mean", "sum", "none"),
    "sample_weight": (False, True),
    "normalizer": (None, 17.5),
    "apart": (1.0, 0.03, 8.0),
}
OF_LINEAR: dict[str, tuple[Any, ...]] = {"bias": (False, True), "workspace": (None, 67 * 8 * 4, 1)}


def covering_divergences(function: str, dtype: str) -> list[Case]:
    """Return cases with every combination of any two options; a top-k teacher has beta 0."""
    factors = FACTORS | (OF_LINEAR if function == "linear_divergence" else {})
    rows = [row for seed in range(4 if FULL else 1) for row in covering(factors, 2, f"{function}, {dtype}, {seed}")]
    base = Case(function, (4, 6), 67, dtype, "")
    asked = ({"stats": ("entropy",), "missing": ("entropy",)}, {})
    return [_covered(replace(base, **asked[number % 2]), row) for number, row in enumerate(rows)]


def _covered(base: Case, row: dict[str, Any]) -> Case:
    row = dict(row)
    if row["beta"] == "tv" and row["teacher"] != "drop":
        row |= {"kind": "tv", "beta": 0.0}
    elif row["teacher"] not in ("logits", "linear"):
        row["beta"] = 0.0
    if row["reduction"] != "mean":
        row["normalizer"] = None
    name = ", ".join(f"{key}={value}" for key, value in row.items() if key not in ("teacher", "reduction"))
    fields = {key: row.pop(key) for key in ("teacher", "reduction", "apart", "bias", "workspace") if key in row}
    cap = 5.0 if row["softcap"] else None
    return replace(base, name=name, options=row, teacher_softcap=cap, teacher_scale=row["logit_scale"], **fields)
