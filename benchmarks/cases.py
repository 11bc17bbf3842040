"""What a case is: a frozen dataclass of facts that everything else reads; `benchmarks.suites` has the cases.

A case also says who takes part, because an implementation that needs minutes at one size would otherwise decide how
long everybody waits; whoever is left out is named in the table, and `--full` brings them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["IGNORE_INDEX", "ITEM_BYTES", "Case", "Function", "Goal", "Leaf", "Quantity"]

Function = Literal["linear", "logits"]
Leaf = Literal["input", "weight"]
Quantity = Literal[
    "time",
    "memory",
    "memory beyond gradients",
    "beyond gradients / logits",
    "peak MiB",
    "loss error",
    "gradient errors",
]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
IGNORE_INDEX = -100


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
    `--full`. `accuracy` asks for errors against a wider dtype, which on the CPU only linear cases have.

    `reduction` is "mean" or "none", with which the upstream gradient is random. `ignored` is the share of the targets,
    in [0, 1), that are `IGNORE_INDEX`. `trained` names the inputs of a linear case that want a gradient. `model` names
    one that has a head of this size.
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
    reduction: Literal["mean", "none"] = "mean"
    ignored: float = 0.0
    trained: tuple[Leaf, ...] = ("input", "weight")
    model: str = ""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Case:
        """Make the case again out of what `dataclasses.asdict` and JSON made of it."""
        goals = tuple(Goal(**goal) for goal in fields["goals"])
        tuples = {name: tuple(fields[name]) for name in ("contenders", "left_out", "trained")}
        return cls(**{**fields, **tuples, "goals": goals})

    @property
    def title(self) -> str:
        """The case in one line, e.g. "linear 2048x512x32000 float32, forward + backward"."""
        sizes = [self.tokens, self.hidden, self.vocabulary] if self.hidden else [self.tokens, self.vocabulary]
        facts = [f"{self.function} {'x'.join(map(str, sizes))} {self.dtype}"]
        facts.append("forward + backward" if self.backward else "no_grad")
        if self.model:
            facts.append(self.model)
        if self.reduction != "mean":
            facts.append(f"reduction {self.reduction}")
        if self.ignored:
            facts.append(f"{self.ignored:.0%} ignored")
        facts += [f"{name} frozen" for name in self.frozen]
        return ", ".join(facts)

    @property
    def frozen(self) -> tuple[Leaf, ...]:
        """The inputs of a linear case that want no gradient though the case has a backward."""
        if self.function == "logits" or not self.backward:
            return ()
        leaves: tuple[Leaf, ...] = ("input", "weight")
        return tuple(leaf for leaf in leaves if leaf not in self.trained)

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
        rows = {"input": self.tokens, "weight": self.vocabulary}
        return sum(rows[leaf] for leaf in self.trained) * self.hidden * ITEM_BYTES[self.dtype]
