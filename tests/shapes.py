"""Small shapes for all backends. Each has a name that says what it covers."""

from dataclasses import replace

from tests.options import LOG_PROB_OPTIONS, OPTIONS
from xent.command.check.case import LOSSES, Case

__all__ = ["SHAPES", "shape_cases"]

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


def shape_cases(function: str, dtype: str) -> list[Case]:
    """Return a case for every shape: losses with reduction "mean" and "none", log-probabilities with the entropy."""
    chosen = []
    for reason, shape in SHAPES.items():
        if shape.offset and dtype in ("bfloat16", "float16"):
            shape = replace(shape, offset=16.0)
        case = replace(shape, function=function, dtype=dtype, name=reason)
        if case.is_linear:
            case = replace(case, bias=bool(shape.offset))
        if function in LOSSES:
            chosen += [replace(case, reduction=reduction) for reduction in ("mean", "none")]
        elif "probabilities" not in shape.options:
            options = LOG_PROB_OPTIONS["all"] if shape.name == "all" else shape.options
            chosen.append(replace(case, options=options, reduction="none", entropy=True))
    return chosen
