"""The protocol between the command line and a measuring process: one JSON object per line, one reply per request.

Requests are the frozen dataclasses of this module. Replies are plain objects; one with the key "absent", "skipped" or
"error" contains only the reason. On the CPU a process measures one contender (Open, FirstCall, Time, WriteTruth). On a
GPU it measures all of them (Describe, OpenCase, Prepare, Turn). With several GPUs there is one process per GPU, and all
get the same requests (Join first). Training steps are measured in one process, whose variants share a model
(OpenTraining, FirstStep, PeakStep, Steps).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, get_args

from benchmarks.cases import Case

__all__ = [
    "OUT_OF_MEMORY",
    "Describe",
    "FirstCall",
    "FirstStep",
    "Join",
    "Open",
    "OpenCase",
    "OpenTraining",
    "PeakStep",
    "Prepare",
    "Request",
    "Steps",
    "Time",
    "Turn",
    "WriteTruth",
    "decode",
    "encode",
]

OUT_OF_MEMORY = "out of memory"
"""The reason with which a training process skips a step that needs more memory than there is."""


@dataclass(frozen=True)
class Open:
    """Open a case for one contender and warm up. Reply: {"threads": int}."""

    case: Case
    contender: str
    threads: int | None


@dataclass(frozen=True)
class FirstCall:
    """Make the first call at full size and measure its peak memory; compare with the truth file, if one is given.

    Reply: {"peak_bytes": int or null, "seconds": float, "loss": float} and, given a truth file, {"loss_error",
    "input_gradient_error", "weight_gradient_error"}. The seconds are used to plan the timing; they are not a result.
    """

    truth: str | None


@dataclass(frozen=True)
class Time:
    """Make this many calls.

    Reply: {"seconds": float, "disturbance": float}: the mean time of a call, and the share of all cores that other
    processes used meanwhile.
    """

    calls: int


@dataclass(frozen=True)
class WriteTruth:
    """Compute the case in float64 and write the result to this file. Reply: {}."""

    path: str


@dataclass(frozen=True)
class Describe:
    """Request the facts of the device and its software. Reply: the result of `benchmarks.gpu.facts`."""

    device: str


@dataclass(frozen=True)
class OpenCase:
    """Open a case: drop the one before, create the inputs and, if needed, the truth. Reply: {}."""

    case: Case


@dataclass(frozen=True)
class Prepare:
    """Create one contender of the open case, warm it up, and measure peak memory, errors and host time.

    Reply: the fields of a record ("peak_bytes", "first_call_seconds", "loss", "host", ...), and to plan the timing
    "call_seconds" in a loop and "turn_seconds" for a turn of `Turn`'s fewest calls.
    """

    contender: str


@dataclass(frozen=True)
class Turn:
    """Make one untimed call, a loop of `iterations`, and `calls` calls that are timed on the device.

    Reply: {"loop": float, "seconds": float}, each for one call.
    """

    contender: str
    iterations: int
    calls: int


@dataclass(frozen=True)
class Join:
    """Join the process group as this rank, with the file `meeting` as the rendezvous. Reply: {}."""

    device: str
    rank: int
    ranks: int
    meeting: str


@dataclass(frozen=True)
class OpenTraining:
    """Create a model and its optimizer, in place of those before. Reply: {"held_bytes": int}, weights and optimizer."""

    model: str
    device: str
    dtype: str
    checkpointing: bool


@dataclass(frozen=True)
class FirstStep:
    """Make a forward and a backward pass, without changing the weights. Reply: {"loss": float}."""

    variant: str
    length: int


@dataclass(frozen=True)
class PeakStep:
    """Make a training step. Reply: {"peak": int or null, "seconds": float}; the peak includes weights and optimizer."""

    variant: str
    length: int


@dataclass(frozen=True)
class Steps:
    """Make this number of training steps and synchronise once, at the end. Reply: {"seconds": float} of one step."""

    variant: str
    length: int
    steps: int


Request = (
    Open
    | FirstCall
    | Time
    | WriteTruth
    | Describe
    | OpenCase
    | Prepare
    | Turn
    | Join
    | OpenTraining
    | FirstStep
    | PeakStep
    | Steps
)
_REQUESTS: dict[str, type[Request]] = {kind.__name__: kind for kind in get_args(Request)}


def encode(request: Request) -> str:
    """Encode the request as one line of JSON."""
    return json.dumps({"request": type(request).__name__, **asdict(request)})


def decode(line: str) -> Request:
    """Decode a request from a line of `encode`."""
    fields: dict[str, Any] = json.loads(line)
    kind = _REQUESTS[fields.pop("request")]
    if "case" in fields:
        fields["case"] = Case.from_fields(fields["case"])
    return kind(**fields)
