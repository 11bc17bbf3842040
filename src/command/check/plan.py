"""The cases of `python -m xent check`: the smallest set that reaches every kernel and loop, and pairs of options."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import combinations, product
from typing import Any

from xent.backends.harness import Harness
from xent.command.check.case import LOSSES, Case
from xent.core.spec import DIFFERENTIABLE

__all__ = ["FUNCTIONS", "chunk_cases", "covering", "pairs", "reaching"]

FUNCTIONS = (*LOSSES, "log_probs", "linear_log_probs", "divergence", "linear_divergence")

Setting = dict[str, Any]
"""Options, and fields of a case, that belong together."""

_BENDS: dict[str, Sequence[Setting]] = {
    "softcap": ({}, {"softcap": 3.0}),
    "scale": ({}, {"logit_scale": 1.5}, {"logit_scale": -0.7}),
}
_OF_LINEAR: dict[str, Sequence[Setting]] = {
    "bias": ({}, {"bias": True}),
    "shift": ({}, {"shift": 2}),
    "workspace": ({}, {"workspace": 67 * 8 * 5}),
}
_OF_LOSSES: dict[str, Sequence[Setting]] = _BENDS | {
    "reduction": (
        {},
        {"normalizer": 13.5},
        {"normalizer": "array"},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"reduction": "none", "stats": DIFFERENTIABLE},
    ),
    "target": ({}, {"ignore_index": 2}, {"probabilities": True}, {"probabilities": True, "trained": True}),
    "weight": ({}, {"weight": True}),
    "smoothing": ({}, {"label_smoothing": 0.1}, {"label_smoothing": 1.0}),
    "z_loss": ({}, {"z_loss": 0.02}),
    "sample_weight": ({}, {"sample_weight": True}),
}
_OF_LOG_PROBS: dict[str, Sequence[Setting]] = _BENDS | {
    "asked": (
        {},
        {"entropy": True},
        {"entropy": True, "missing": ("log_probs",)},
        {"entropy": True, "stats": ("lse",), "missing": ("entropy",)},
    ),
    "temperature": ({}, {"temperature": 0.7}, {"temperature": "rows"}),
    "target": ({}, {"ignore_index": 2}),
    "support": ({}, {"support": True}),
}
_ENTROPY: Setting = {"stats": ("entropy",), "missing": ("entropy",)}
_OF_DIVERGENCES: dict[str, Sequence[Setting]] = _BENDS | {
    "teacher": (
        {},
        {"beta": 0.5},
        {"beta": 1.0},
        {"teacher": "linear", "beta": 0.1, "teacher_softcap": 4.0},
        {"kind": "tv"},
        {"teacher": "bucket"},
        {"teacher": "bucket", "kind": "tv"},
        {"teacher": "renormalize"},
        {"teacher": "drop"},
    ),
    "reduction": ({}, {"normalizer": 13.5}, {"reduction": "sum"}, {"reduction": "none"}),
    "temperature": ({}, {"temperature": 2.5}),
    "sample_weight": ({}, {"sample_weight": True}),
    "entropy": ({}, _ENTROPY),
}
_FIELDS = {one.name for one in fields(Case)}
_EVERY = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 5.0, "logit_scale": 0.8, "sample_weight": True}
_OF_ROWS = {"temperature": "rows", "softcap": 5.0, "logit_scale": 0.8}


def reaching(harness: Harness[Any], function: str, dtype: str) -> list[Case]:
    """Return the smallest set of cases that reaches every kernel and loop of the device.

    One dtype, bfloat16, gets every size that the harness names; the others a short row.
    """
    sizes = {"short": 67} | (harness.sizes(dtype) if dtype == "bfloat16" else {})
    if function.endswith("divergence"):
        short = Case(function, (3, 7), 67, dtype, "short", reduction="none")
        chunks = replace(short, name="chunks", workspace=67 * 8 * 5, reduction="mean")
        long = replace(short, name="long", rows=(3,), vocabulary=3001, classes=64, reduction="mean")
        longer = [chunks if function.startswith("linear_") else long] if len(sizes) > 1 else []
        return [_set(case, (setting,)) for case in (short, *longer) for setting in _OF_DIVERGENCES["teacher"]]
    plain = Case(function, (5,), 1, dtype, "", hidden=16, ignored=0.0, alone=True)
    cases = []
    for reason, vocabulary in sizes.items():
        case = replace(plain, vocabulary=vocabulary, name=reason)
        rows = replace(case, reduction="none", entropy=function not in LOSSES)
        if function not in LOSSES:
            # No support for long rows of a linear function: the gradient of a class in one row's support would cancel.
            allowed = {"support": True} if not plain.is_linear or vocabulary == 67 else {}
            cases.append(replace(rows, name=f"{reason}, options", options=_OF_ROWS | allowed, stats=("lse",)))
            continue
        cases += [case, rows]
        if not plain.is_linear:
            every = replace(case, name=f"{reason}, all", options=_EVERY | {"weight": True}, ignored=0.3)
            cases += [every, replace(every, name=f"{reason}, probabilities", options=_EVERY | {"probabilities": True})]
    return cases + (chunk_cases(function, dtype) if plain.is_linear and len(sizes) > 1 else [])


def chunk_cases(function: str, dtype: str) -> list[Case]:
    """Return cases of a linear function in one chunk, in four (the last one smaller), and in more than 16.

    The gradient of a classifier is accumulated in another way over more than 16 chunks.
    """
    one = Case(function, (24,), 1000, dtype, "one chunk", hidden=32, ignored=0.2, alone=True)
    if function not in LOSSES:
        one = replace(one, reduction="none", entropy=True)
    row = one.vocabulary * {"float64": 8, "float32": 4}.get(dtype, 2)
    several = replace(one, name="several chunks", workspace=7 * row, bias=True)
    if function not in LOSSES:
        return [one, several]
    return [one, several, replace(several, reduction="none"), replace(one, name="many chunks", workspace=row)]


def pairs(function: str, dtype: str) -> list[Case]:
    """Return cases that have every pair of two settings of options, results and gradients."""
    factors = _OF_LOSSES if function in LOSSES else _OF_DIVERGENCES if "divergence" in function else _OF_LOG_PROBS
    if function.startswith("linear_"):
        factors = factors | _OF_LINEAR
    reduction = "none" if function.endswith("log_probs") else "mean"
    base = Case(function, (4, 12), 67, dtype, "", reduction=reduction)
    return [_set(base, row) for row in covering(factors, function + dtype)]


def _set(case: Case, settings: Sequence[Setting]) -> Case:
    """Return a case with some settings, which also name it."""
    given = {name: value for setting in settings for name, value in setting.items()}
    shown = [f"{name}={value}" for name, value in given.items() if name not in ("reduction", "teacher")]
    name = ", ".join([*([case.name] if case.name else []), *shown])
    options = {name: value for name, value in given.items() if name not in _FIELDS}
    own = {name: value for name, value in given.items() if name in _FIELDS}
    return replace(case, **({"name": name or "plain", "options": options} | own))


def covering(factors: Mapping[str, Sequence[Setting]], seed: str, draws: int = 50) -> list[tuple[Setting, ...]]:
    """Return rows, each with one setting of every factor, in which every pair of settings of two factors occurs.

    Of some random rows, those are kept that have the most pairs which are still missing.
    """
    generator = random.Random(seed)
    sizes = [range(len(settings)) for settings in factors.values()]
    missing = {(a, b, i, j) for a, b in combinations(range(len(sizes)), 2) for i, j in product(sizes[a], sizes[b])}
    rows = []

    def new(row: list[int]) -> set[tuple[int, int, int, int]]:
        return {(a, b, row[a], row[b]) for a, b in combinations(range(len(row)), 2)} & missing

    while missing:
        drawn = [[generator.choice(size) for size in sizes] for _ in range(draws)]
        a, b, i, j = min(missing)
        for row in drawn:
            row[a], row[b] = i, j
        best = max(drawn, key=lambda row: len(new(row)))
        missing -= new(best)
        rows.append(tuple(settings[place] for settings, place in zip(factors.values(), best, strict=True)))
    return rows
