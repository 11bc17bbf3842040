"""What the measuring process and its driver say to each other: one JSON object per line, a reply to every request.

Requests are frozen dataclasses here, so that both sides share one description of them. Replies are plain objects; one
with the key "absent" or "error" holds the reason why there is nothing else in it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cases import Case, Goal

__all__ = ["FirstCall", "Open", "Request", "Time", "WriteTruth", "decode", "encode"]


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


Request = Open | FirstCall | Time | WriteTruth


def encode(request: Request) -> str:
    """Write the request as one line of JSON."""
    return json.dumps({"request": type(request).__name__, **asdict(request)})


def decode(line: str) -> Request:
    """Read the request that `encode` turned into this line."""
    fields: dict[str, Any] = json.loads(line)
    kind = fields.pop("request")
    if kind == "Open":
        case = fields.pop("case")
        goals = tuple(Goal(**goal) for goal in case.pop("goals"))
        contenders, left_out = tuple(case.pop("contenders")), tuple(case.pop("left_out"))
        return Open(case=Case(**case, goals=goals, contenders=contenders, left_out=left_out), **fields)
    others: dict[str, type[FirstCall | Time | WriteTruth]] = {
        "FirstCall": FirstCall,
        "Time": Time,
        "WriteTruth": WriteTruth,
    }
    return others[kind](**fields)
