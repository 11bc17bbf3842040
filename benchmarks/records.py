"""One measurement as a line of JSON, with all that is needed to read it on its own: case, machine and versions."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, Quantity

__all__ = ["Record", "load_records"]


@dataclass
class Record:
    """What is known about one contender on one case.

    `status` is "measured", or "absent", "failed", "skipped" or "left out" with the `reason`. `pairs` holds the seconds
    per call of the base and of the contender, measured one right after the other; the base pairs with itself and has
    none. `seconds` are those of the contender alone, in order. `gradient_bytes` is the memory that the gradients must
    take, 0 where they take the place of the logits. `disturbance` is the share of all cores' time that other processes
    took, for each of `seconds`; it is not measured for a GPU. `judge` is the contender whose errors are those of an
    unfused computation.
    """

    case: Case
    contender: str
    base: str
    status: str = "measured"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)
    disturbance: list[float] = field(default_factory=list)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    calls_per_sample: int = 1
    first_call_seconds: float = 0.0
    peak_bytes: int | None = None
    base_peak_bytes: int | None = None
    gradient_bytes: int = 0
    base_gradient_bytes: int = 0
    loss: float | None = None
    loss_error: float | None = None
    input_gradient_error: float | None = None
    weight_gradient_error: float | None = None
    judge: str = ""
    judge_input_gradient_error: float | None = None
    judge_weight_gradient_error: float | None = None
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def milliseconds(self) -> float | None:
        """The median time of one call."""
        return statistics.median(self.seconds) * 1e3 if self.seconds else None

    @property
    def ratios(self) -> list[float]:
        """The time against the base, pair by pair."""
        return [contender / base for base, contender in self.pairs]

    @property
    def beyond_gradients(self) -> int | None:
        """Peak bytes above the start less those of the gradients that must exist; below 0 only by page rounding."""
        return None if self.peak_bytes is None else self.peak_bytes - self.gradient_bytes

    def quantity(self, name: Quantity) -> float | None:
        """Return the number that a goal with this `quantity` limits; None if it was not measured."""
        if name == "time":
            return statistics.median(self.ratios) if self.ratios else None
        if name == "loss error":
            return self.loss_error
        if name == "gradient errors":
            return self._gradient_errors_against_judge()
        if self.peak_bytes is None:
            return None
        if name == "peak MiB":
            return self.peak_bytes / 2**20
        beyond = self.peak_bytes - self.gradient_bytes
        if name == "beyond gradients / logits":
            return beyond / self.case.logits_bytes
        if self.base_peak_bytes is None:
            return None
        if name == "memory":
            return self.peak_bytes / self.base_peak_bytes
        return beyond / (self.base_peak_bytes - self.base_gradient_bytes)

    def _gradient_errors_against_judge(self) -> float | None:
        """Return the larger of the two ratios."""
        pairs = (
            (self.input_gradient_error, self.judge_input_gradient_error),
            (self.weight_gradient_error, self.judge_weight_gradient_error),
        )
        return max((mine / judge for mine, judge in pairs if mine is not None and judge), default=None)

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second as if the logits were read once and, with a backward, their gradient written once."""
        if self.case.function != "logits" or not self.seconds:
            return None
        passes = 2 if self.case.backward else 1
        return passes * self.case.logits_bytes / statistics.median(self.seconds)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Read what `to_json` wrote."""
        fields = json.loads(line)
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        known["case"] = Case.from_fields(known["case"])
        known["pairs"] = [(base, contender) for base, contender in known["pairs"]]
        return cls(**known)

    def to_json(self) -> str:
        """Write one line, the derived numbers included."""
        derived = {
            "milliseconds": self.milliseconds,
            "time_ratio": self.quantity("time"),
            "time_ratio_min": min(self.ratios, default=None),
            "time_ratio_max": max(self.ratios, default=None),
            "memory_ratio": self.quantity("memory"),
            "beyond_gradients_bytes": self.beyond_gradients,
            "logits_bytes": self.case.logits_bytes,
            "bandwidth_bytes_per_second": self.bandwidth,
        }
        return json.dumps({"title": self.case.title, **asdict(self), **derived})


def load_records(path: Path) -> list[Record]:
    """Read a file of JSON lines."""
    return [Record.from_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
