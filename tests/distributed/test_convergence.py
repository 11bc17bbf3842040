"""The language model of tests/convergence with a sharded head has the losses and weights of one process."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import xent
from tests.convergence.agreement import disagreements
from tests.convergence.training import Run, from_hidden, train, vocabulary
from tests.distributed.pool import Pool, device, group
from tests.distributed.test_faults import FAULTS
from tests.targets import Target

CUT = 100
"""First class of the second shard."""


def _mine() -> slice:
    return slice(0, CUT) if dist.get_rank() == 0 else slice(CUT, None)


def in_shards(target: Target, arrays: tuple[Any, ...], classes: Any, options: dict[str, Any]) -> Any:
    """Compute the loss of hidden states and this rank's rows of the classifier."""
    hidden, weight, bias, zeros = arrays
    shard = {"linear_weight": weight[_mine()], "linear_bias": bias[_mine()]}
    loss = xent.linear_cross_entropy(
        hidden, **shard, target=classes, backend=target.name, vocab_parallel=group(2), **options
    )
    return loss + 0 * zeros.sum()


def trained(dtype: str, fault: str | None) -> Run | None:
    """Train in the first two processes."""
    if dist.get_rank() > 1:
        return None
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            FAULTS[fault].plant(patch)
        run = train(Target("torch", str(device())), in_shards, dtype)
    return replace(run, steps=[replace(step, logits=None) for step in run.steps])


def joined(pool: Pool, dtype: str, fault: str | None = None) -> Run:
    """Combine the runs of both ranks, with each rank's rows of the classifier."""
    first, second = pool.run(trained, dtype, fault)[:2]
    assert first.losses == second.losses
    for number in (0, 1):
        np.testing.assert_array_equal(first.after[number], second.after[number])
    whole = [np.concatenate([first.after[number][:CUT], second.after[number][CUT:]]) for number in (2, 3)]
    return replace(first, after=[*first.after[:2], *whole])


@pytest.fixture(scope="module")
def alone() -> dict[str, Run]:
    target = Target("torch", str(device()))
    return {dtype: train(target, from_hidden, dtype) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_head_trains_like_a_whole_one(pool: Pool, alone: dict[str, Run], dtype: str) -> None:
    assert vocabulary() > 2 * CUT
    run = joined(pool, dtype)
    assert run.losses[-1] < run.losses[0] - 1
    assert disagreements(run, alone[dtype], alone["float32"], dtype, False) == []


@pytest.mark.parametrize("fault", ["hidden states' gradient, summed twice", "sums, exponentials of rank 0 doubled"])
def test_fault_in_a_collective_is_found(pool: Pool, alone: dict[str, Run], fault: str) -> None:
    run = joined(pool, "float32", fault)
    assert disagreements(run, alone["float32"], alone["float32"], "float32", False)
