"""The suites of the CPU: "bars" holds the sizes for which the project has set itself goals.

"tokens" and "vocabulary" change one size at a time and show how cost grows.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.cases import Case, Goal

__all__ = ["QUICK", "SUITES"]

_LINEAR = ("torch", "torch.compile", "torch chunked", "xent")
_LOGITS = ("torch", "torch.compile", "xent", "xent inplace")

# "Nothing besides the gradient" has to be a number: a tenth of the logits, and 2% where not even a gradient is new.
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
        goals=(Goal("xent", "time", 1.00), Goal("xent", "memory", 0.50), Goal("xent", "loss error", 1e-4)),
    ),
    Case(
        "bars",
        "logits",
        2048,
        0,
        32000,
        "float32",
        _LOGITS,
        goals=(
            Goal("xent", "time", 0.70),
            Goal("xent", "beyond gradients / logits", 0.10),
            Goal("xent inplace", "time", 0.70),
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
        ("torch", "torch.compile", "xent"),
        backward=False,
        goals=(Goal("xent", "time", 0.60), Goal("xent", "beyond gradients / logits", 0.10)),
    ),
    Case(
        "bars",
        "linear",
        8192,
        512,
        128256,
        "float32",
        ("torch", "xent"),
        left_out=("torch.compile", "torch chunked"),
        accuracy=True,
        goals=(Goal("xent", "time", 0.90), Goal("xent", "memory beyond gradients", 0.10)),
    ),
)

_BARS_QUICK = (
    Case(
        "bars",
        "linear",
        1024,
        256,
        8000,
        "float32",
        ("torch", "torch chunked", "xent"),
        left_out=("torch.compile",),
        accuracy=True,
    ),
    Case(
        "bars",
        "linear",
        1024,
        256,
        8000,
        "bfloat16",
        ("torch", "torch chunked", "xent"),
        left_out=("torch.compile",),
        accuracy=True,
    ),
    Case("bars", "logits", 1024, 0, 8000, "float32", ("torch", "xent", "xent inplace"), left_out=("torch.compile",)),
    Case("bars", "logits", 1024, 0, 8000, "float32", ("torch", "xent"), left_out=("torch.compile",), backward=False),
)


def _tokens(sizes: Iterable[int], hidden: int, vocabulary: int) -> tuple[Case, ...]:
    return tuple(Case("tokens", "linear", n, hidden, vocabulary, "float32", ("torch", "xent")) for n in sizes)


def _vocabulary(sizes: Iterable[int], tokens: int, hidden: int) -> tuple[Case, ...]:
    return tuple(Case("vocabulary", "linear", tokens, hidden, v, "float32", ("torch", "xent")) for v in sizes)


SUITES: dict[str, tuple[Case, ...]] = {
    "bars": _BARS,
    "tokens": _tokens((1024, 2048, 4096, 8192, 16384), hidden=512, vocabulary=32000),
    "vocabulary": _vocabulary((8192, 16384, 32768, 65536, 131072, 262144), tokens=2048, hidden=256),
}

QUICK: dict[str, tuple[Case, ...]] = {
    "bars": _BARS_QUICK,
    "tokens": _tokens((512, 1024, 2048), hidden=128, vocabulary=8192),
    "vocabulary": _vocabulary((4096, 8192, 16384), tokens=512, hidden=128),
}
