"""What the measuring process and its driver say to each other: one JSON object per line, a reply to every request.

Requests are frozen dataclasses here, so that both sides share one description of them. Replies are plain objects; one
with the key "absent", "skipped" or "error" holds the reason why there is nothing else in it. On the CPU one process
serves one contender (Open, FirstCall, Time, WriteTruth); on a GPU it serves all of them (Describe, OpenCase, Prepare,
Turn).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cases import Case

__all__ = [
    "Describe",
    "FirstCall",
    "Open",
    "OpenCase",
    "Prepare",
    "Request",
    "Time",
    "Turn",
    "WriteTruth",
    "decode",
    "encode",
]


@dataclass(frozen=True)
class Open:
    """Take up one case for one contender and warm up. Reply: {"threads": int}."""

    case: Case
    contender: str
    threads: int | None


@dataclass(frozen=True)
class FirstCall:
    """Make the first call at full size and take its peak memory; compare with the truth file, if one is named.

    Reply: {"peak_bytes": int or null, "seconds": float, "loss": float} and, given a truth file, {"loss_error",
    "input_gradient_error", "weight_gradient_error"}. The seconds serve to plan the timing, they are not a result.
    """

    truth: str | None


@dataclass(frozen=True)
class Time:
    """Make this many calls.

    Reply: {"seconds": float, "disturbance": float}, the mean time of one call and what other processes took meanwhile,
    as a share of all cores.
    """

    calls: int


@dataclass(frozen=True)
class WriteTruth:
    """Compute the case in float64 into this file. Reply: {}."""

    path: str


@dataclass(frozen=True)
class Describe:
    """Name the device and the versions of what runs on it. Reply: the facts that `benchmarks.gpu.facts` collects."""

    device: str


@dataclass(frozen=True)
class OpenCase:
    """Take up one case: drop the one before, make the inputs and, if asked for, the truth. Reply: {}."""

    case: Case


@dataclass(frozen=True)
class Prepare:
    """Build one contender of the open case, warm it up, and take its peak memory and its errors.

    Reply: the fields of a record ("peak_bytes", "first_call_seconds", "loss", ...), and to plan the timing
    "call_seconds" on the device and "turn_seconds" on the host, for one timed call and one that is not.
    """

    contender: str


@dataclass(frozen=True)
class Turn:
    """Make one call that nobody times, then this many that are timed. Reply: {"seconds": [float, ...]}."""

    contender: str
    calls: int


Request = Open | FirstCall | Time | WriteTruth | Describe | OpenCase | Prepare | Turn
_REQUESTS: dict[str, type[Request]] = {
    kind.__name__: kind for kind in (Open, FirstCall, Time, WriteTruth, Describe, OpenCase, Prepare, Turn)
}


def encode(request: Request) -> str:
    """Write the request as one line of JSON."""
    return json.dumps({"request": type(request).__name__, **asdict(request)})


def decode(line: str) -> Request:
    """Read the request that `encode` turned into this line."""
    fields: dict[str, Any] = json.loads(line)
    kind = _REQUESTS[fields.pop("request")]
    if "case" in fields:
        fields["case"] = Case.from_fields(fields["case"])
    return kind(**fields)
