"""What is measured: every case as a frozen dataclass of facts, collected into suites.

The suite "bars" holds the sizes for which the project has set itself goals; "tokens" and "vocabulary" change one size
at a time and show how cost grows. A case also says who takes part, because an implementation that needs minutes at one
size would otherwise decide how long everybody waits; whoever is left out is named in the table, and `--full` brings
them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["ITEM_BYTES", "SUITES", "Case", "Function", "Goal", "Quantity", "select_cases"]

Function = Literal["linear", "logits"]
Quantity = Literal["time", "memory", "memory beyond gradients", "beyond gradients / logits", "loss error"]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Goal:
    """An upper limit that the project has set for one contender in one case; shown beside the number, never enforced.

    `quantity` is one of the names that `benchmarks.records.Record.quantity` knows.
    """

    contender: str
    quantity: Quantity
    at_most: float


@dataclass(frozen=True)
class Case:
    """One problem: the function, its sizes and dtype, and who solves it.

    `hidden` is 0 for `function="logits"`, whose input is the logits themselves. `contenders` names those who run (see
    `benchmarks.contenders.CONTENDERS`), the base of all ratios first; `left_out` names those who run only with
    `--full`. `accuracy` asks for errors against float64, which only linear cases have.
    """

    suite: str
    function: Function
    tokens: int
    hidden: int
    vocabulary: int
    dtype: str
    contenders: tuple[str, ...]
    backward: bool = True
    left_out: tuple[str, ...] = ()
    accuracy: bool = False
    goals: tuple[Goal, ...] = ()
    device: str = "cpu"

    @property
    def title(self) -> str:
        """The case in one line, e.g. "linear 2048x512x32000 float32, forward + backward"."""
        sizes = [self.tokens, self.hidden, self.vocabulary] if self.hidden else [self.tokens, self.vocabulary]
        work = "forward + backward" if self.backward else "no_grad"
        return f"{self.function} {'x'.join(map(str, sizes))} {self.dtype}, {work}"

    @property
    def logits_bytes(self) -> int:
        """The size of the full (tokens, vocabulary) logits in the dtype of the case."""
        return self.tokens * self.vocabulary * ITEM_BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """The size of the gradients that have to exist when the call returns."""
        if not self.backward:
            return 0
        if self.function == "logits":
            return self.logits_bytes
        return (self.tokens + self.vocabulary) * self.hidden * ITEM_BYTES[self.dtype]


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

_QUICK: dict[str, tuple[Case, ...]] = {
    "bars": _BARS_QUICK,
    "tokens": _tokens((512, 1024, 2048), hidden=128, vocabulary=8192),
    "vocabulary": _vocabulary((4096, 8192, 16384), tokens=512, hidden=128),
}


def select_cases(suites: Iterable[str], *, quick: bool, full: bool) -> list[Case]:
    """List the cases of the named suites: `quick` takes small sizes, `full` brings back whoever was left out."""
    table = _QUICK if quick else SUITES
    cases = [case for suite in suites for case in table[suite]]
    if not full:
        return cases
    return [replace(case, contenders=case.contenders + case.left_out, left_out=()) for case in cases]
