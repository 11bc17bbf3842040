"""The suites of the CPU: "bars" has sizes with goals; "chunks" measures errors.

The errors are those of the classifier's bfloat16 gradient, whose sum over chunks may be rounded.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases import Case, Goal

__all__ = ["QUICK", "SUITES"]

_LINEAR = ("torch", "torch.compile", "torch chunked", "xent")

# The goal for memory besides the gradient: a tenth of the logits, or 2% if the gradient overwrites them.
_BARS = (
    Case(
        "bars",
        "linear",
        2048,
        512,
        32000,
        "float32",
        _LINEAR,
        accuracy=True,
        goals=(Goal("xent", "time", 0.90), Goal("xent", "memory", 0.30)),
    ),
    Case(
        "bars",
        "linear",
        2048,
        512,
        32000,
        "bfloat16",
        _LINEAR,
        accuracy=True,
        goals=(Goal("xent", "time", 0.90), Goal("xent", "memory", 0.50), Goal("xent", "loss error", 1e-4)),
    ),
    # The base is the compiled loss, because the goal is a multiple of its time.
    Case(
        "bars",
        "logits",
        2048,
        0,
        32000,
        "float32",
        ("torch.compile", "torch", "xent", "xent inplace"),
        goals=(
            Goal("xent", "time", 1.0),
            Goal("xent", "beyond gradients / logits", 0.10),
            Goal("xent inplace", "time", 1.0),
            Goal("xent inplace", "beyond gradients / logits", 0.02),
        ),
    ),
    Case(
        "bars",
        "logits",
        2048,
        0,
        32000,
        "float32",
        ("torch.compile", "torch", "xent"),
        backward=False,
        goals=(Goal("xent", "time", 1.0), Goal("xent", "beyond gradients / logits", 0.10)),
    ),
    Case(
        "bars",
        "linear",
        8192,
        512,
        128256,
        "float32",
        ("torch", "xent"),
        accuracy=True,
        goals=(Goal("xent", "time", 0.90), Goal("xent", "memory beyond gradients", 0.10)),
    ),
)

_CHUNKS = ("xent 16 chunks", "xent 64 chunks", "xent 250 chunks")
_ERRORS = Case(
    "chunks",
    "linear",
    2000,
    256,
    8000,
    "bfloat16",
    ("torch", "xent", *_CHUNKS),
    accuracy=True,
    goals=tuple(Goal(name, "gradient errors", 1.2) for name in _CHUNKS),
)


def _small(case: Case) -> Case:
    """Return the case with a small size, without contenders that compile."""
    contenders = tuple(name for name in case.contenders if name != "torch.compile")
    tokens, hidden, vocabulary = case.tokens // 4, case.hidden // 4, case.vocabulary // 16
    return replace(case, tokens=tokens, hidden=hidden, vocabulary=vocabulary, contenders=contenders, goals=())


SUITES: dict[str, tuple[Case, ...]] = {"bars": _BARS, "chunks": (_ERRORS,)}
QUICK: dict[str, tuple[Case, ...]] = {name: tuple(map(_small, suite)) for name, suite in SUITES.items()}
