"""Kernels for a vocabulary in shards: on several GPUs, or in Triton's interpreter with gloo."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import xent
from tests.cases import EVERYWHERE, FACTORS, FACTORS_OF_LOG_PROBS, FACTORS_OF_STATS, FUNCTIONS, LOG_PROBS
from tests.covering import FULL
from tests.distributed.calls import Way
from tests.distributed.conftest import pool as pool
from tests.distributed.judge import judged_beside_the_whole
from tests.distributed.matrix import cases_in_shards, saturated_cases
from tests.distributed.pool import GPUS, INTERPRETED, Pool, device, group
from tests.triton.noted import note_launches
from xent.backends.torch.sharded import layout
from xent.core.check.cases import Case

pytestmark = pytest.mark.skipif(not (GPUS or INTERPRETED), reason="takes two GPUs, or Triton's interpreter")

TOGETHER = 2 if FULL else 1
"""Strength of the covering set: each setting, or all pairs of settings. On a GPU nearly every case compiles kernels."""
MATRIX = [
    *(("", function, FACTORS) for function in FUNCTIONS),
    *((" with statistics", function, FACTORS_OF_STATS) for function in FUNCTIONS),
    *(("", function, FACTORS_OF_LOG_PROBS) for function in LOG_PROBS),
]


@pytest.mark.parametrize(
    ("case", "way"),
    [
        *(
            param
            for name, function, factors in MATRIX
            for param in cases_in_shards(function, factors, name, "triton", EVERYWHERE, TOGETHER)
        ),
        *saturated_cases("triton"),
    ],
)
def test_kernels_equal_the_call_on_the_whole_vocabulary(pool: Pool, case: Case, way: Way) -> None:
    judged_beside_the_whole(pool, case, way)


def launches_of(reduction: str) -> list[str]:
    """Return the names of the kernels that a call with three chunks launches on this rank, forward and backward."""
    if dist.get_rank() > 1:
        return []
    layout.forget()
    torch.manual_seed(dist.get_rank())
    hidden = torch.randn(6, 8, dtype=torch.bfloat16, device=device(), requires_grad=True)
    weight = torch.randn(16, 8, dtype=torch.bfloat16, device=device(), requires_grad=True)
    target = torch.arange(6, device=device()) * 5
    options = {"reduction": reduction, "workspace": 4 * 16 * 2, "vocab_parallel": group(2), "backend": "triton"}
    with pytest.MonkeyPatch.context() as patch:
        xent.linear_cross_entropy(hidden, weight, target, **options)  # this imports the kernels
        launches = note_launches(patch)
        xent.linear_cross_entropy(hidden, weight, target, **options).sum().backward()
    return [name.removeprefix("shard_").removesuffix("_kernel") for name, *_ in launches]


def test_a_chunk_takes_four_launches(pool: Pool) -> None:
    found = Counter(pool.run(launches_of, "mean")[0])
    assert (found["take"], found["fold"], found["land"], found["gradient"]) == (3, 3, 3, 3), found
    found = Counter(pool.run(launches_of, "none")[0])
    assert found["fold"] == found["land"] > 1, found
    assert found["again"] == found["gradient"] > 1, found
    assert found["take"] == found["fold"] + found["again"], found
