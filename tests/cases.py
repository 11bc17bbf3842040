"""The matrix: the combinations of functions, options, dtypes, reductions and shapes that are tested.

Their full product has tens of thousands of cases. The matrix has each option alone, each shape in each dtype, and a
covering set: every combination of two options in each dtype, and of three options in at least one dtype. Where
kernels are slow, interpreted or emulated, it has every combination of two options and dtypes.
XENT_TEST_FULL=1, which `nox -s full` sets, adds covering sets with other seeds and the product of named options,
reductions and dtypes.

Log-probabilities, and losses whose statistics have gradients, use the same steps as losses. The matrix has every
combination of two of their settings in each dtype, or with an interpreter, which is slow, in at least one dtype.
"""

from dataclasses import replace
from functools import cache
from itertools import cycle, product
from typing import Any

from tests.covering import FULL, SLOW, covering
from tests.options import LOG_PROB_OPTIONS, OPTIONS, option_cases
from xent.command.check.case import LOSSES as FUNCTIONS
from xent.command.check.case import Case
from xent.core.spec import DIFFERENTIABLE

__all__ = [
    "DTYPES",
    "EVERYWHERE",
    "FUNCTIONS",
    "LOG_PROBS",
    "SHAPES",
    "all_cases",
    "covering_cases",
    "factors_of",
    "log_prob_cases",
    "named_cases",
    "paired_cases",
    "shape_cases",
]

LOG_PROBS = ("log_probs", "linear_log_probs")
DTYPES = ("float64", "float32", "bfloat16", "float16")
EVERYWHERE = DTYPES[1:]
"""The dtypes that every backend supports."""
REDUCTIONS = ("mean", "sum", "none")

SHAPES: dict[str, Case] = {
    "one row": Case("", (1,), 50, "", "plain"),
    "one row, no leading axis": Case("", (), 37, "", "plain", ignored=0.0),
    "no rows": Case("", (0,), 11, "", "plain"),
    "no rows in a batch": Case("", (3, 0), 11, "", "plain"),
    "one class": Case("", (5,), 1, "", "plain"),
    "two classes": Case("", (7,), 2, "", "plain"),
    "three leading axes": Case("", (2, 3, 4), 19, "", "plain"),
    "every target ignored": Case("", (9,), 13, "", "plain", ignored=2.0),
    "no target ignored": Case("", (40,), 29, "", "plain", ignored=0.0),
    "most targets ignored": Case("", (3, 30), 23, "", "plain", ignored=0.9),
    "a power of two": Case("", (64,), 256, "", "plain"),
    "one above a power of two": Case("", (33,), 257, "", "plain"),
    "a vocabulary beyond one block": Case("", (24,), 33_003, "", "plain", hidden=8),
    "more rows than one block": Case("", (2100,), 9, "", "plain", hidden=8),
    "logits far from zero": Case("", (20,), 31, "", "plain", offset=400.0),
    "int32 targets": Case("", (20,), 31, "", "plain", target_dtype="int32"),
    "uint8 targets": Case("", (20,), 31, "", "plain", {"ignore_index": 255}, target_dtype="uint8"),
    "int8 targets": Case("", (20,), 31, "", "plain", target_dtype="int8"),
    "all options, one class": Case("", (5,), 1, "", "all", OPTIONS["all"]),
    "all options, many rows": Case("", (3, 70), 41, "", "all", OPTIONS["all"]),
    "all probabilities, odd sizes": Case("", (3, 7), 35, "", "all", OPTIONS["probabilities, all"]),
}

FACTORS: dict[str, tuple[dict[str, Any], ...]] = {
    "reduction": (
        {"reduction": "mean"},
        {"reduction": "mean", "normalizer": 13.5},
        {"reduction": "mean", "normalizer": "array"},
        {"reduction": "sum"},
        {"reduction": "none"},
    ),
    "target": ({}, {"ignore_index": 2}, {"probabilities": True}),
    "weight": ({}, {"weight": True}),
    "smoothing": ({}, {"label_smoothing": 0.1}, {"label_smoothing": 1.0}),
    "z_loss": ({}, {"z_loss": 0.05}),
    "softcap": ({}, {"softcap": 3.0}),
    "scale": ({}, {"logit_scale": 1.5}, {"logit_scale": -0.7}),
    "sample_weight": ({}, {"sample_weight": True}),
}
FACTORS_OF_STATS: dict[str, tuple[dict[str, Any], ...]] = FACTORS | {
    "reduction": (
        {"reduction": "none", "stats": DIFFERENTIABLE},
        {"reduction": "none", "stats": DIFFERENTIABLE, "missing": ("loss",)},
        {"reduction": "none", "stats": ("lse",)},
        {"reduction": "none", "stats": ("nll", "entropy"), "missing": ("nll",)},
    ),
}
FACTORS_OF_LOG_PROBS: dict[str, tuple[dict[str, Any], ...]] = {
    "asked": (
        {"reduction": "none"},
        {"reduction": "none", "entropy": True},
        {"reduction": "none", "entropy": True, "missing": ("log_probs",)},
        {"reduction": "none", "entropy": True, "stats": ("lse",), "missing": ("entropy",)},
    ),
    "temperature": ({}, {"temperature": 0.7}, {"temperature": "rows"}),
    "softcap": ({}, {"softcap": 3.0}),
    "scale": ({}, {"logit_scale": 1.5}, {"logit_scale": -0.7}),
    "target": ({}, {"ignore_index": 2}),
    "support": ({}, {"support": True}),
}
OF_LINEAR: dict[str, tuple[dict[str, Any], ...]] = {"bias": ({}, {"bias": True}), "shift": ({}, {"shift": 2})}
FIELDS = ("reduction", "bias", "shift", "entropy", "stats", "missing")
"""Settings that are fields of a case, not options."""


def factors_of(function: str) -> dict[str, tuple[Any, ...]]:
    """Return the factors of a covering set: setting -> values, which are options or fields of a case, or a dtype."""
    linear = OF_LINEAR if function == "linear_cross_entropy" else {}
    return {"dtype": EVERYWHERE} | FACTORS | linear


@cache
def _rows(function: str, wide: bool, seed: int) -> list[dict[str, Any]]:
    factors = factors_of(function)
    if wide:
        return covering(factors | {"dtype": ("float64",)}, 2, f"{function} in float64, {seed}")
    return covering(factors, 2 if SLOW and not FULL else 3, f"{function}, {seed}")


def covering_cases(function: str, dtype: str, seed: int = 0) -> list[Case]:
    """Return the cases of one dtype in a covering set, with every combination of two options."""
    base = Case(function, (4, 12), 67, dtype, "")
    return [_covered(base, row, seed) for row in _rows(function, dtype == "float64", seed) if row["dtype"] == dtype]


def paired_cases(function: str, dtypes: tuple[str, ...], together: int = 2) -> list[Case]:
    """Return cases with every combination of two settings; for a loss, cases whose statistics have gradients.

    `together`: 1 for cases with every setting.
    """
    linear = OF_LINEAR if function.startswith("linear_") else {}
    factors = {"dtype": dtypes} | (FACTORS_OF_STATS if function in FUNCTIONS else FACTORS_OF_LOG_PROBS) | linear
    rows = covering(factors, together, f"pairs of {function} in {', '.join(dtypes)}, 0")
    return [_covered(Case(function, (4, 12), 67, row["dtype"], ""), row, 0) for row in rows]


def _covered(base: Case, row: dict[str, Any], seed: int) -> Case:
    settings = {name: value for name in row.keys() - {"dtype"} for name, value in row[name].items()}
    options = {name: value for name, value in sorted(settings.items()) if name not in FIELDS}
    fields = {name: value for name, value in settings.items() if name in FIELDS}
    named = {name: value for name, value in sorted(settings.items()) if name != "reduction"}
    on = [name if value is True else f"{name}={value}" for name, value in named.items()]
    return replace(base, name=f"seed {seed}: {', '.join(on) or 'plain'}", options=options, **fields)


def named_cases(function: str, dtype: str) -> list[Case]:
    """Return the plain loss with every reduction, and the other named options, each with one dtype and reduction."""
    cases = [case for case in option_cases(function, dtype) if not case.stats and not case.trained]
    dealt = zip(dict.fromkeys(case.name for case in cases), cycle(product(EVERYWHERE, REDUCTIONS)), strict=False)
    mine = {name: reduction for name, (wanted, reduction) in dealt if wanted == dtype}
    mine |= {name: "mean" for name in mine if name in OPTIONS and OPTIONS[name].keys() == {"normalizer"}}
    reported = [case for case in option_cases(function, dtype) if case.stats and dtype in ("float32", "bfloat16")]
    reported = [case for case in reported if not case.trained]
    trained = [case for case in option_cases(function, dtype) if case.trained]
    reported += trained[("float32", "bfloat16").index(dtype) :: 2] if dtype in ("float32", "bfloat16") else []
    return [case for case in cases if case.name == "plain" or mine.get(case.name) == case.reduction] + reported


def shape_cases(function: str, dtype: str) -> list[Case]:
    """Return every shape. Over all dtypes, each has every reduction, both without options and with all options."""
    factors = {"shape": tuple(SHAPES), "dtype": DTYPES, "reduction": REDUCTIONS, "options": ("plain", "all")}
    rows = [row for row in covering(factors, 2, f"shapes of {function}") if row["dtype"] == dtype]
    return [_shaped(function, dtype, row["shape"], row["reduction"], row["options"]) for row in rows]


def _shaped(function: str, dtype: str, shape: str, reduction: str, options: str) -> Case:
    case = replace(SHAPES[shape], function=function, dtype=dtype, name=shape, reduction=reduction)
    narrow = dtype in ("bfloat16", "float16")
    if case.offset:  # a softcap would remove the offset
        return replace(case, offset=16.0 if narrow else case.offset, bias=function == "linear_cross_entropy")
    if narrow and case.vocabulary > 10_000:  # with so many classes, some gradients would almost cancel
        return case
    if options == "all" and not case.options:
        return replace(case, name=f"{shape}, all", options=OPTIONS["all"])
    return case


def log_prob_cases(function: str) -> list[Case]:
    """Return named options and shapes, each in one dtype."""
    many = Case(function, (9,), 3001, "", "all, many classes", LOG_PROB_OPTIONS["all"], "none", 8, entropy=True)
    every = [
        [*option_cases(function, dtype), *_shapes_of_log_probs(function, dtype), replace(many, dtype=dtype)]
        for dtype in EVERYWHERE
    ]
    if FULL:
        return [case for cases in every for case in cases]
    return [same[number % len(same)] for number, same in enumerate(zip(*every, strict=True))]


def _shapes_of_log_probs(function: str, dtype: str) -> list[Case]:
    """Return a case of a log-probability function for every shape, with the entropy."""
    chosen = []
    for reason, shape in SHAPES.items():
        if shape.offset and dtype in ("bfloat16", "float16"):
            shape = replace(shape, offset=16.0)
        case = replace(shape, function=function, dtype=dtype, name=reason)
        if case.is_linear:
            case = replace(case, bias=bool(shape.offset))
        if "probabilities" not in shape.options:
            options = LOG_PROB_OPTIONS["all"] if shape.name == "all" else shape.options
            chosen.append(replace(case, options=options, reduction="none", entropy=True))
    return chosen


def all_cases(function: str, dtype: str) -> list[Case]:
    """Return the matrix of one function and dtype."""
    named = option_cases(function, dtype) if FULL else named_cases(function, dtype)
    covered = [case for seed in range(5 if FULL else 1) for case in covering_cases(function, dtype, seed)]
    return named + covered + shape_cases(function, dtype)
