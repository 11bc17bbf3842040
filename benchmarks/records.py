"""Records of measurements, and their format as lines of JSON: one for the machine, each case, and each contender.

The line of a contender has only what was measured, rounded to four digits, so that a file of a hundred measurements has
at most a hundred kilobytes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case

__all__ = ["Record", "compare_with_judge", "load_records", "write_records"]

Pairs = list[tuple[float, float]]
_LEAST_BASE = 2**20  # bytes: ratios to less memory would be of the size of pages


@dataclass
class Record:
    """The measurement of one contender on one case.

    `status` is "measured", or "absent", "failed" or "skipped" with the `reason`. `seconds` are the times of calls, on a
    GPU the device times. On a GPU, `loop` are the loop times. `host` is the host time. `pairs` and `loop_pairs` hold
    the seconds of the base and of the contender in the same round; the base has none. `gradient_bytes` is the memory of
    the returned gradients, 0 if they overwrite the logits. `judge` is the contender with the
    unfused computation, whose errors the others are compared with. `longest` is the longest sequence of a training step
    that was seen to fit into the limit, `at_least` whether longer ones were not tried because their step takes too
    long.
    """

    case: Case
    contender: str
    status: str = "measured"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)
    host: float | None = None
    pairs: Pairs = field(default_factory=list)
    loop_pairs: Pairs = field(default_factory=list)
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
    longest: int | None = None
    at_least: bool = False
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The contender that is the base of ratios."""
        return self.case.contenders[0]

    @property
    def seen(self) -> float | None:
        """The median loop time in seconds, if there is one, otherwise the median time of a call."""
        return statistics.median(self.loop or self.seconds) if self.seconds else None

    def quantity(self, name: str) -> float | None:
        """Return the number that a goal for this `quantity` limits; None if it was not measured."""
        match name:
            case "loop":
                return _median_ratio(self.loop_pairs or self.pairs)
            case "time":
                return _median_ratio(self.pairs)
            case "host us":
                return None if self.host is None else self.host * 1e6
            case "loss error":
                return self.loss_error
            case "gradient errors":
                return self._gradient_errors_against_judge()
            case _:
                return self._memory(name)

    def _memory(self, name: str) -> float | None:
        if self.peak_bytes is None:
            return None
        beyond = self.peak_bytes - self.gradient_bytes
        if name == "peak MiB":
            return self.peak_bytes / 2**20
        if name == "beyond gradients / logits":
            return beyond / self.case.logits_bytes
        base = (self.base_peak_bytes or 0) - (0 if name == "memory" else self.base_gradient_bytes)
        if base < _LEAST_BASE:
            return None
        return (self.peak_bytes if name == "memory" else beyond) / base

    def _gradient_errors_against_judge(self) -> float | None:
        """Return the larger of the two ratios."""
        pairs = (
            (self.input_gradient_error, self.judge_input_gradient_error),
            (self.weight_gradient_error, self.judge_weight_gradient_error),
        )
        return max((mine / judge for mine, judge in pairs if mine is not None and judge), default=None)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields that differ from defaults, without case, machine, and times that are also in pairs."""
        dropped = {"case", "machine"}
        dropped |= {"seconds"} if len(self.pairs) == len(self.seconds) else set()
        dropped |= {"loop"} if len(self.loop_pairs) == len(self.loop) else set()
        known = {name: value for name, value in asdict(self).items() if name not in dropped}
        # A measured peak of 0 is written, although 0 looks like a default.
        zeros = {name for name, value in known.items() if value == 0 and getattr(Record, name, None) == 0}
        return {
            name: _rounded(value) for name, value in known.items() if value not in ("", None, []) and name not in zeros
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any], case: Case, machine: dict[str, Any]) -> Record:
        """Return the record for the fields of `to_fields`, read from JSON; unknown fields of old files are ignored."""
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        for pairs, alone in (("pairs", "seconds"), ("loop_pairs", "loop")):
            known[pairs] = [(base, contender) for base, contender in known.get(pairs, [])]
            known.setdefault(alone, [contender for _, contender in known[pairs]])
        return cls(**{**known, "case": case, "machine": machine})


def _median_ratio(pairs: Pairs) -> float | None:
    return statistics.median(contender / base for base, contender in pairs) if pairs else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def compare_with_judge(records: Iterable[Record], name: str) -> None:
    """Copy the errors of the unfused computation, the contender `name`, to all records of its case."""
    records = list(records)
    judge = next((record for record in records if record.contender == name and record.status == "measured"), None)
    for record in records if judge is not None else []:
        record.judge = name
        record.judge_input_gradient_error = judge.input_gradient_error
        record.judge_weight_gradient_error = judge.weight_gradient_error


def write_records(records: Iterable[Record]) -> Iterator[str]:
    """Yield lines of JSON; machine and case are written only if they change."""
    machine, case = None, None
    for record in records:
        if record.machine != machine:
            machine = record.machine
            yield json.dumps({"machine": machine}) + "\n"
        if record.case != case:
            case = record.case
            yield json.dumps({"title": case.title, "case": case.to_fields()}) + "\n"
        yield json.dumps(record.to_fields()) + "\n"


def load_records(path: Path) -> list[Record]:
    """Read the lines of `write_records` from a file."""
    records: list[Record] = []
    machine: dict[str, Any] = {}
    case: Case | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        machine = fields.get("machine", machine)
        case = Case.from_fields(fields["case"]) if "case" in fields else case
        if "contender" in fields and case is not None:
            records.append(Record.from_fields(fields, case, machine))
    return records
