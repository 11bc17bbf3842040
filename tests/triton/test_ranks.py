"""Kernels for a vocabulary in shards: on several GPUs, or in Triton's interpreter with gloo."""

import pytest

from tests.cases import EVERYWHERE, FACTORS, FACTORS_OF_LOG_PROBS, FACTORS_OF_STATS, FUNCTIONS, LOG_PROBS
from tests.covering import FULL
from tests.distributed import test_divergences as divergences
from tests.distributed import test_ranks as ranks
from tests.distributed.calls import Way
from tests.distributed.conftest import pool as pool
from tests.distributed.judge import judged_beside_the_whole
from tests.distributed.matrix import cases_in_shards, saturated_cases
from tests.distributed.pool import GPUS, INTERPRETED, Pool
from xent.command.check.case import Case

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


@pytest.mark.parametrize(("case", "way"), divergences.dense_cases()[:: 8 if INTERPRETED else 4])
def test_divergences_equal_the_call_on_the_whole_vocabulary(pool: Pool, case: Case, way: Way) -> None:
    divergences.judge(pool, case, way)


@pytest.mark.parametrize(("name", "differs"), [one for one in ranks.CASES if one[0] in ranks.BY_KERNELS])
def test_rows_that_differ_are_nan(pool: Pool, name: str, differs: str) -> None:
    ranks.check_nan(pool, name, differs, 2, "triton")


@pytest.mark.parametrize("name", ranks.BY_KERNELS)
@pytest.mark.parametrize("how", ["overlap, although as many classes as there are", "all classes", "empty"])
def test_ranges_that_do_not_tile_the_vocabulary_are_nan(pool: Pool, how: str, name: str) -> None:
    ranks.check_ranges(pool, how, name, "triton")


@pytest.mark.parametrize(("name", "differs"), [*ranks.IGNORED, ("hidden log probs", "temperature")])
def test_rows_without_a_result_are_not_nan(pool: Pool, name: str, differs: str) -> None:
    ranks.check_ignored(pool, name, differs, "triton")
