"""Covering sets of the divergences' options: every combination of any two in each dtype."""

from dataclasses import replace
from typing import Any

from tests.covering import FULL, covering
from tests.divergence.named import TEACHERS
from xent.command.check.case import Case

__all__ = ["covering_divergences"]

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
    asked: tuple[dict[str, Any], ...] = ({"stats": ("entropy",), "missing": ("entropy",)}, {})
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
