"""A vocabulary in shards with kernels: on as many GPUs, or in Triton's interpreter with gloo."""

import pytest

from tests.cases import EVERYWHERE, FACTORS, FACTORS_OF_LOG_PROBS, FACTORS_OF_STATS, FUNCTIONS, LOG_PROBS
from tests.distributed.calls import Way
from tests.distributed.conftest import pool as pool
from tests.distributed.judge import judged_beside_the_whole
from tests.distributed.matrix import cases_in_shards
from tests.distributed.pool import GPUS, INTERPRETED, Pool
from xent.core.check.cases import Case

pytestmark = pytest.mark.skipif(not (GPUS or INTERPRETED), reason="takes two GPUs, or Triton's interpreter")

TOGETHER = 2 if GPUS else 1
"""All pairs of settings, or in the interpreter each setting."""
MATRIX = [
    *(("", function, FACTORS) for function in FUNCTIONS),
    *((" with statistics", function, FACTORS_OF_STATS) for function in FUNCTIONS),
    *(("", function, FACTORS_OF_LOG_PROBS) for function in LOG_PROBS),
]


@pytest.mark.parametrize(
    ("case", "way"),
    [
        param
        for name, function, factors in MATRIX
        for param in cases_in_shards(function, factors, name, "triton", EVERYWHERE, TOGETHER)
    ],
)
def test_kernels_give_what_the_whole_gives(pool: Pool, case: Case, way: Way) -> None:
    judged_beside_the_whole(pool, case, way)
