"""Ranks that disagree all raise the same error; an error on one rank names it; and how many collectives a call has."""

import datetime
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xent
from tests.distributed.planted import COLLECTIVES, replace_collective
from tests.distributed.pool import GPUS, Pool, device, group

CLASSES = 12
FIRST = [0, 6]


def attempt(
    arguments: list[dict[str, Any] | None], environment: dict[str, str] | None = None, patience: int | None = None
) -> Any:
    """Return the type and the message of the error that this rank's call with `arguments[rank]` raises.

    None makes no call. `patience`: the timeout of the group in seconds.
    """
    rank, ranks = dist.get_rank(), len(arguments)
    patient = None if patience is None else dist.new_group([*range(ranks)], datetime.timedelta(seconds=patience))
    own = arguments[rank] if rank < ranks else None
    if own is None:
        return None
    members = group(ranks) if patient is None else patient
    mine = {"rows": CLASSES // ranks, "vocab_parallel": {}} | own
    rows, said = mine.pop("rows"), mine.pop("vocab_parallel")
    generator = torch.Generator().manual_seed(mine.pop("seed", rank))
    call = {
        "input": torch.linspace(-1, 1, 20).view(5, 4),
        "linear_weight": torch.randn(rows, 4, generator=generator),
        "target": torch.arange(5) * 2,
        "vocab_parallel": xent.VocabParallel(members, **said) if said else members,
    } | mine
    call = {name: value.to(device()) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        try:
            xent.linear_cross_entropy(**call)
        except Exception as error:
            return type(error).__name__, str(error)
    return None


BAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "overlap": (
        [{"vocab_parallel": {"first": 0}}, {"vocab_parallel": {"first": 4}}],
        r"the shards overlap: rank 1 has classes \[4, 10\) and should have \[6, 12\), after those of rank 0",
    ),
    "gap at the start": (
        [{"vocab_parallel": {"first": 7}}, {"vocab_parallel": {"first": 1}}],
        r"the shards leave a gap: rank 1 has classes \[1, 7\) and should have \[0, 6\)$",
    ),
    "some name their first class": (
        [{"vocab_parallel": {"first": 0}}, {}],
        r"either all ranks name vocab_parallel.first or none: it is 0 on rank 0 and None on rank 1",
    ),
    "sizes": (
        [{"vocab_parallel": {"size": 12}}, {"vocab_parallel": {"size": 11}}],
        r"vocab_parallel.size must be the same on all ranks: it is 12 on rank 0 and 11 on rank 1",
    ),
    "nothing at all": ([{"rows": 0}] * 2, "there must be at least one class, got empty shards on all ranks"),
    "the whole classifier, known by its size": (
        [{"rows": CLASSES, "vocab_parallel": {"size": CLASSES}}] * 2,
        "all 2 ranks have the same 12 classes: is that the whole vocabulary",
    ),
    "the whole classifier, known by its values": (
        [{"rows": CLASSES, "seed": 0}] * 2,
        r"all 2 ranks have the same 12 classes: .*xent.VocabParallel\(group, size=24\)",
    ),
    "options": ([{}, {"label_smoothing": 0.1}], "all ranks must make the same call: rank 1 differs from rank 0 in opt"),
    "workspace": ([{}, {"workspace": 100}], "all ranks must make the same call: rank 1 differs from rank 0"),
    "rows": (
        [{}, {"input": torch.zeros(4, 4), "target": torch.arange(4)}],
        "the number of tokens differs between ranks: it is 5 on rank 0, 4 on rank 1. .* model.lm_head.unshard",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_all_ranks_raise(pool: Pool, name: str) -> None:
    arguments, message = BAD[name]
    found = pool.run(attempt, arguments)[: len(arguments)]
    for rank, (kind, text) in enumerate(found):
        assert kind == "ValueError"
        assert text.startswith(f"rank {rank}: ")
        assert text[8:] == found[0][1][8:]
        assert re.search(message, text)


OWN: dict[str, tuple[dict[str, Any], str, str]] = {
    "shapes": ({"linear_bias": torch.zeros(3)}, "ValueError", r"rank 1: linear_bias must have shape (6,), the rows of"),
    "dtypes": ({"linear_weight": torch.zeros(6, 4).double()}, "TypeError", "rank 1: linear_weight must have the dtype"),
    "options": ({"label_smoothing": 2.0}, "ValueError", "rank 1: label_smoothing must be in [0, 1], got 2.0"),
    "backend": (
        {"backend": "numpy"},
        "BackendError",
        "rank 1: backend 'numpy' takes numpy arrays and got torch arrays",
    ),
    "tokens": (
        {"vocab_parallel": {"sequence_parallel": True}, "target": torch.zeros(7, dtype=torch.int64)},
        "ValueError",
        "rank 1: with sequence_parallel, 7 tokens on 2 ranks are cut as torch.chunk cuts them: this rank should have "
        "3, tokens [4, 7), and its input has 5",
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_error_on_one_rank_names_it_and_waits_for_no_other(pool: Pool, name: str) -> None:
    arguments, kind, message = OWN[name]
    found = pool.run(attempt, [None, arguments])[1]
    assert found[0] == kind
    assert found[1].startswith(message)


@pytest.mark.skipif(GPUS, reason="NCCL ends the process at a timeout")
def test_other_ranks_wait_until_the_timeout_of_the_group(pool: Pool) -> None:
    waiting, own = pool.run(attempt, [{}, {"label_smoothing": 2.0}], None, 2)[:2]
    assert own == ("ValueError", "rank 1: label_smoothing must be in [0, 1], got 2.0")
    assert waiting[0] == "RuntimeError"
    assert waiting[1].startswith("rank 0: ")


def test_targets_out_of_range_raise_on_all_ranks(pool: Pool) -> None:
    target = torch.tensor([0, 1, 12, 3, 4])
    found = pool.run(attempt, [{"target": target}] * 2, {"XENT_CHECK_TARGETS": "1"})[:2]
    message = "rank {}: target[2] is 12; classes are 0 to 11, or ignore_index=-100"
    assert found == [("IndexError", message.format(rank)) for rank in range(2)]


def collectives_of(calls: int, ranks: int, names_both: bool) -> list[str]:
    """Return the collectives of a number of equal calls, forward and backward."""
    if dist.get_rank() >= ranks:
        return []
    counted: list[str] = []
    torch.manual_seed(dist.get_rank())
    rows = 64  # a GPU's logits have no padding then
    shards = xent.VocabParallel(group(ranks), rows * dist.get_rank(), rows * ranks) if names_both else group(ranks)
    with pytest.MonkeyPatch.context() as patch:
        for kind in COLLECTIVES:

            def make(function: Any, kind: str = kind) -> Any:
                def count(*args: Any, **more: Any) -> Any:
                    counted.append(kind)
                    return function(*args, **more)

                return count

            replace_collective(patch, kind, make)
        for step in range(calls):
            hidden = torch.linspace(-1, 1, 320, device=device()).view(40, 8).requires_grad_()
            weight = torch.randn(rows, 8, device=device(), requires_grad=True)
            target = torch.arange(40, device=device())
            target[: 5 * step] = -100
            if step % 2:
                hidden.data[0], weight.data[0] = torch.nan, -torch.inf
            loss = xent.linear_cross_entropy(hidden, weight, target, vocab_parallel=shards, workspace=8 * 4 * rows * 2)
            loss.backward()
    return counted


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("names_both", [False, True])
def test_collectives_of_a_loop(pool: Pool, ranks: int, names_both: bool) -> None:
    found = pool.run(collectives_of, 3, ranks, names_both)[:ranks]
    assert found[0] == found[-1]
    # 40, 35 and 30 rows in chunks of 8 rows. Ranks first agree on the number of rows to compute; without first and size
    # each call exchanges the ranges before that.
    chunks = (5, 5, 4)
    first = 1 if names_both else 2
    assert found[0] == [name for count in chunks for name in (*["gather"] * (first + count), "reduce")]
