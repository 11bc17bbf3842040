"""A case: one problem, which several contenders compute. `suites.toml` has the measured ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["IGNORE_INDEX", "SUITES", "Case", "Function", "quick"]

Function = Literal[
    "linear", "logits", "sharded", "linear log-probabilities", "log-probabilities", "linear divergence", "training"
]

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Case:
    """The function, its sizes and dtype, and the contenders.

    "linear" and "logits" are the cross entropy; "sharded" is "linear", or with a `teacher` a divergence, with the rows
    of the classifier sharded over `ranks` processes. Log-probabilities are computed together with the entropy, both
    with a random upstream gradient. `hidden` is 0 for functions of logits. The teacher of a divergence has a classifier
    with `teacher` columns, or with "top_k" among the `options` its most probable classes are stored. `contenders` are
    names (`benchmarks.contenders`); the first is the base of all ratios. `accuracy` requests errors against a wider
    dtype.

    `reduction` is "mean", or "none" with a random upstream gradient. `ignored` is the share of targets, in [0, 1), that
    are `IGNORE_INDEX`. `trained` names the inputs of a linear case that require a gradient. `batch` divides `tokens`:
    if it is not 0, the logits are `logits[:, :-1]` of logits (batch, tokens / batch + 1, vocabulary). `options` are
    keyword arguments of xent's function, which PyTorch's contenders also have. `goals` are the project's upper limits,
    (contender, quantity, number), which reports show; `benchmarks.records.Record.quantity` knows the quantities.

    "training" is a step of a `model` of `models.toml` with one sequence of `tokens`, with or without gradient
    `checkpointing`; the longest sequence whose step fits into `limit` GiB is searched.
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
    goals: tuple[tuple[str, str, float], ...] = ()
    device: str = "cpu"
    reduction: Literal["mean", "none"] = "mean"
    ignored: float = 0.0
    trained: tuple[str, ...] = ("input", "weight")
    batch: int = 0
    teacher: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    ranks: int = 1
    model: str = ""
    checkpointing: bool = False
    limit: float = 0.0

    @classmethod
    def from_fields(cls, found: Mapping[str, Any]) -> Case:
        """Return the case for the fields of `to_fields`, read from JSON; unknown fields of older files are ignored."""
        known = {field.name: _tuples(found[field.name]) for field in fields(cls) if field.name in found}
        return cls(**known)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {name: value for name, value in vars(self).items() if value != _DEFAULTS[name]}

    @property
    def title(self) -> str:
        """The case in one line, e.g. "linear 2048x512x32000 float32" for a forward and backward pass."""
        facts = [" ".join(filter(None, (self.function, self.model, self.sizes, self.dtype)))]
        if self.checkpointing:
            facts.append("checkpointing")
        if self.function == "sharded":
            facts.append("divergence " * bool(self.teacher) + f"over {self.ranks} ranks")
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
        if self.is_linear and self.backward:
            facts += [f"{name} frozen" for name in ("input", "weight") if name not in self.trained]
        return ", ".join(facts)

    @property
    def sizes(self) -> str:
        """The sizes, as in "2048x512x32000"."""
        return "x".join(str(size) for size in (self.tokens, self.hidden, self.vocabulary) if size)

    @property
    def is_linear(self) -> bool:
        """Whether the input is hidden states and a classifier."""
        return self.hidden > 0

    @property
    def of_rows(self) -> bool:
        """Whether the result is per row, with a random upstream gradient."""
        return self.reduction == "none" or self.function.endswith("log-probabilities")

    @property
    def logits_bytes(self) -> int:
        """The size of the full (tokens, vocabulary) logits in the dtype of the case."""
        return self.tokens * self.vocabulary * _ITEM_BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """The size in bytes of the returned gradients; with shards, those of the largest shard."""
        if not self.backward or self.function == "training":
            return 0
        if not self.is_linear:
            return self.logits_bytes
        rows = {"input": self.tokens, "weight": -(-self.vocabulary // self.ranks)}
        return sum(rows[leaf] for leaf in self.trained) * self.hidden * _ITEM_BYTES[self.dtype]


_DEFAULTS = {field.name: field.default for field in fields(Case)} | {"hidden": MISSING}


def quick(case: Case) -> Case:
    """Return the case with a small size and no goals, which are for the full size."""
    if case.suite in ("host", "sharded"):
        return replace(case, goals=())
    if case.function == "training":
        family = next((name for name in ("gemma", "qwen") if case.model.startswith(name)), "llama")
        return replace(case, model=f"tiny-{family}", tokens=64, limit=0.01)
    wide = 128 if case.device == "cuda" else 64
    sizes = {"tokens": case.tokens // 32, "hidden": min(case.hidden, wide)}
    sizes |= {"vocabulary": 1024 + case.vocabulary // 1000 * 16 + case.vocabulary % 16}
    sizes |= {"teacher": case.teacher and wide * case.teacher // case.hidden}
    return replace(case, **sizes, goals=())


def _tuples(value: Any) -> Any:
    """Convert JSON's lists to tuples, at any depth."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _suite(name: str, table: dict[str, Any]) -> tuple[Case, ...]:
    common = {key: value for key, value in table.items() if key != "cases"}
    return tuple(_case(name, {**common, **own}) for own in table["cases"])


def _case(suite: str, found: dict[str, Any]) -> Case:
    tokens, *hidden, vocabulary = found.pop("sizes") if "sizes" in found else (found["tokens"], 0)
    goals = [(name, *limit.rsplit(" ", 1)) for name, limit in (goal.split(": ") for goal in found.pop("goals", []))]
    options = tuple((name, _tuples(value)) for name, value in found.pop("options", {}).items())
    sizes = {"tokens": tokens, "hidden": hidden[0] if hidden else 0, "vocabulary": vocabulary}
    limits = [(name, quantity, float(most)) for name, quantity, most in goals]
    return Case.from_fields({"suite": suite, **sizes, **found, "goals": limits, "options": options})


SUITES: dict[str, dict[str, tuple[Case, ...]]] = {
    device: {name: _suite(name, table) for name, table in suites.items()}
    for device, suites in tomllib.loads(Path(__file__).with_name("suites.toml").read_text(encoding="utf-8")).items()
}
"""Device -> its suites by name. The first is the default."""
