"""The table of the results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.training.measure import Result

__all__ = ["markdown"]

_GIB = 2**30
_MOST_REASON = 160
_HEADER = (
    "model",
    "tokens",
    "checkpointing",
    "variant",
    "ms per step",
    "tokens per second",
    "ratio to plain",
    "peak GiB",
    "longest sequence",
)


def markdown(results: Sequence[Result]) -> str:
    """Return a Markdown table with one row per result. A ratio above 1 means more tokens per second than plain."""
    rows = [_HEADER, ("---",) * len(_HEADER), *(_row(result, _plain_rounds(result, results)) for result in results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _plain_rounds(result: Result, results: Sequence[Result]) -> list[float]:
    keys = ("model", "checkpointing", "tokens", "device", "dtype")
    for other in results:
        if other["variant"] == "plain" and other["status"] == "measured" and all(other[k] == result[k] for k in keys):
            rounds: list[float] = other["rounds"]
            return rounds
    return []


def _row(result: Result, plain: Sequence[float]) -> tuple[str, ...]:
    name = (result["model"], str(result["tokens"]), "on" if result["checkpointing"] else "off", result["variant"])
    if result["status"] != "measured":
        return (*name, f"{result['status']}: {result['reason'][:_MOST_REASON]}", "", "", "", _longest(result))
    seconds = statistics.median(result["rounds"])
    ratios = [of_plain / own for of_plain, own in zip(plain, result["rounds"], strict=False)]
    return (
        *name,
        f"{seconds * 1e3:.4g}",
        f"{result['tokens'] / seconds:.0f}",
        f"{statistics.median(ratios):.3f}" if ratios else "",
        "unknown" if result["peak"] is None else f"{result['peak'] / _GIB:.2f}",
        _longest(result),
    )


def _longest(result: Result) -> str:
    if "longest" not in result:
        return ""
    if result["longest"] is None:
        text = "not found"
    else:
        text = f"{'at least ' if result['at_least'] else ''}{result['longest']}"
    reason = f" ({result['longest_reason']})" if "longest_reason" in result else ""
    return f"{text} in {result['limit']:g} GiB{reason}"
