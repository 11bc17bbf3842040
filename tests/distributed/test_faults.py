"""A fault planted in each collective is found: by the reference, by bits that differ between ranks, or by a check."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.calls import Way, in_shards
from tests.distributed.cuts import cut
from tests.distributed.judge import judged
from tests.distributed.planted import replace_collective
from tests.distributed.pool import Pool
from tests.options import OPTIONS
from xent.command.check.case import Case


class Done:
    """The handle of a completed collective."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True)
class Fault:
    """A fault in one kind of collective."""

    collective: str
    strikes: Callable[[Tensor], bool]
    """Whether a collective with this input is of the kind."""
    spoil: Callable[[Tensor], None] | None
    """Changes the result; None skips the collective."""
    caught: str = "Comparison|differs between ranks"

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the collective by the faulty one."""

        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            def faulty(*args: Any, **keywords: Any) -> Any:
                tensors = [one for one in args if isinstance(one, Tensor)]
                received, sent = tensors[0], tensors[-1]
                if not self.strikes(sent):
                    return function(*args, **keywords)
                if self.spoil is not None:
                    work = function(*args, **keywords)
                    if work is not None:
                        work.wait()
                    self.spoil(received)
                elif len(tensors) > 1:
                    received.copy_(sent.flatten()[: received.numel()].view_as(received))
                return Done()

            return faulty

        replace_collective(patch, self.collective, make)


def _is_ranges(sent: Tensor) -> bool:
    return sent.dtype == torch.int64 and sent.numel() > 1


def _is_sums(sent: Tensor) -> bool:
    return sent.is_floating_point() and sent.dim() == 2


def _is_tokens(sent: Tensor) -> bool:
    return sent.is_floating_point() and sent.dim() == 3


def _lose_last(received: Tensor) -> None:
    half = len(received) // 2
    received[half:] = received[:half]


def _swap(received: Tensor) -> None:
    received.copy_(received.roll(len(received) // 2, 0))


FAULTS = {
    "ranges, other order": Fault("gather", _is_ranges, _swap, "the shards leave a gap: rank 0 has classes"),
    "ranges, all those of rank 0": Fault("gather", _is_ranges, _lose_last, "classes with the same values"),
    "sums, all those of rank 0": Fault(
        "gather", _is_sums, _lose_last, "the checksums of the ranks differ, although|Comparison"
    ),
    "sums, exponentials of rank 0 doubled": Fault("gather", _is_sums, lambda received: received[1].mul_(2)),
    "tokens, other order": Fault("gather", _is_tokens, _swap),
    "hidden states' gradient, not summed": Fault("reduce", lambda sent: sent.dim() > 1, None),
    "hidden states' gradient, summed twice": Fault("reduce", lambda sent: sent.dim() > 1, lambda sent: sent.mul_(2)),
    "class weights of targets, not told": Fault("reduce", lambda sent: sent.dim() == 1, None),
    "gradient of tokens in shards, not summed": Fault("scatter", lambda sent: True, None),
}


def with_fault(case: Case, way: Way, name: str) -> Any:
    """Return the results of a process with a fault."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name].plant(patch)
        return in_shards(case, way)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(pool: Pool, name: str) -> None:
    case = Case("linear_cross_entropy", (3, 8), 68, "float32", "", OPTIONS["weight, smoothing"], workspace=68 * 4 * 14)
    # A cut in reverse order names its ranges, so that they are not exchanged.
    how = "uneven" if "ranges" in name else "reversed"
    way = Way(2, cut(how, 68, 2), sequence_parallel="tokens" in name)
    with pytest.raises(AssertionError, match=FAULTS[name].caught):
        judged(pool, case, way, with_fault, name)
