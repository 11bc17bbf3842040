"""The description of a case, a frozen dataclass. `benchmarks.suites` has the cases."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal

__all__ = ["IGNORE_INDEX", "ITEM_BYTES", "Case", "Function", "Goal", "Leaf", "Quantity"]

Function = Literal["linear", "logits", "sharded", "linear log-probabilities", "log-probabilities", "linear divergence"]
Leaf = Literal["input", "weight"]
Quantity = Literal[
    "loop",
    "time",
    "memory",
    "memory beyond gradients",
    "beyond gradients / logits",
    "peak MiB",
    "host us",
    "host us a further chunk",
    "loss error",
    "gradient errors",
]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Goal:
    """The project's upper limit for one contender in one case. It is shown beside the number, but not enforced.

    `quantity` is one of the names that `benchmarks.records.Record.quantity` knows.
    """

    contender: str
    quantity: Quantity
    at_most: float


@dataclass(frozen=True)
class Case:
    """One problem: the function, its sizes and dtype, and the contenders.

    "linear" and "logits" are the cross entropy; "sharded" is "linear" with the rows of the classifier sharded over
    `ranks` processes. Log-probabilities are computed together with the entropy, both with a random upstream gradient.
    `hidden` is 0 for functions of logits. The teacher of a divergence has a classifier with `teacher` columns, or with
    "top_k" among the `options` its most probable classes are stored. `contenders` are names (see
    `benchmarks.contenders`); the first is the base of all ratios. `accuracy` requests errors against a wider dtype; on
    the CPU only linear cases have them.

    `reduction` is "mean", or "none" with a random upstream gradient. `ignored` is the share of targets, in [0, 1), that
    are `IGNORE_INDEX`. `trained` names the inputs of a linear case that require a gradient. `batch` divides `tokens`:
    if it is not 0, the logits are `logits[:, :-1]` of logits (batch, tokens / batch + 1, vocabulary). `options` are
    keyword arguments of xent's function, which PyTorch's contenders also have: `softcap`, `label_smoothing`, `stats`,
    and `beta` of a divergence.
    """

    suite: str
    function: Function
    tokens: int
    hidden: int
    vocabulary: int
    dtype: str
    contenders: tuple[str, ...]
    backward: bool = True
    accuracy: bool = False
    goals: tuple[Goal, ...] = ()
    device: str = "cpu"
    reduction: Literal["mean", "none"] = "mean"
    ignored: float = 0.0
    trained: tuple[Leaf, ...] = ("input", "weight")
    batch: int = 0
    teacher: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    ranks: int = 1

    @classmethod
    def from_fields(cls, found: dict[str, Any]) -> Case:
        """Return the case for the fields of `to_fields`, read from JSON; unknown fields of older files are ignored."""
        known: dict[str, Any] = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        known["goals"] = tuple(Goal(**goal) for goal in known.get("goals", ()))
        for name in ("contenders", "trained", "options"):
            if name in known:
                known[name] = _tuples(known[name])
        return cls(**known)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {field.name: asdict(self)[field.name] for field in fields(self) if self._is_set(field)}

    def _is_set(self, field: Any) -> bool:
        return field.default is MISSING or getattr(self, field.name) != field.default

    @property
    def title(self) -> str:
        """The case in one line, e.g. "linear 2048x512x32000 float32" for a forward and backward pass."""
        sizes = [self.tokens, self.hidden, self.vocabulary] if self.is_linear else [self.tokens, self.vocabulary]
        facts = [f"{self.function} {'x'.join(map(str, sizes))} {self.dtype}"]
        if self.function == "sharded":
            facts.append(f"over {self.ranks} ranks")
        if not self.backward:
            facts.append("loss alone")
        if self.reduction != "mean":
            facts.append(f"reduction {self.reduction}")
        if self.ignored:
            facts.append(f"{self.ignored:.0%} ignored")
        if self.teacher not in (0, self.hidden):
            facts.append(f"a teacher of {self.teacher} columns")
        if self.batch:
            facts.append(f"logits[:, :-1] of {self.batch} sequences")
        for name, value in self.options:
            facts.append(" + ".join(value) if name == "stats" else f"{name} {value:g}")
        facts += [f"{name} frozen" for name in self.frozen]
        return ", ".join(facts)

    @property
    def is_linear(self) -> bool:
        """Whether the input is hidden states and a classifier."""
        return self.hidden > 0

    @property
    def of_rows(self) -> bool:
        """Whether the result is per row, with a random upstream gradient."""
        return self.reduction == "none" or self.function.endswith("log-probabilities")

    @property
    def frozen(self) -> tuple[Leaf, ...]:
        """The inputs of a linear case with a backward pass that do not require a gradient."""
        if not self.is_linear or not self.backward:
            return ()
        leaves: tuple[Leaf, ...] = ("input", "weight")
        return tuple(leaf for leaf in leaves if leaf not in self.trained)

    @property
    def logits_bytes(self) -> int:
        """The size of the full (tokens, vocabulary) logits in the dtype of the case."""
        return self.tokens * self.vocabulary * ITEM_BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """The size in bytes of the returned gradients; with shards, those of the largest shard."""
        if not self.backward:
            return 0
        if not self.is_linear:
            return self.logits_bytes
        rows = {"input": self.tokens, "weight": -(-self.vocabulary // self.ranks)}
        return sum(rows[leaf] for leaf in self.trained) * self.hidden * ITEM_BYTES[self.dtype]


def _tuples(value: Any) -> Any:
    """Convert JSON's lists to tuples, at any depth."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
