"""Calls with shards against the same call on the whole vocabulary: results, gradients, statistics, equal bits."""

from dataclasses import replace

import numpy as np
import pytest

from tests.cases import FACTORS, FACTORS_OF_LOG_PROBS, FACTORS_OF_STATS, FUNCTIONS, LOG_PROBS, SHAPES
from tests.covering import crossed
from tests.distributed.calls import Way
from tests.distributed.cuts import cut
from tests.distributed.judge import joined, judged, judged_beside_the_whole
from tests.distributed.matrix import RANKS, cases_in_shards, saturated_cases
from tests.distributed.pool import Pool
from tests.options import OPTIONS
from xent.command.check.case import Case

MATRIX = [
    *(param for function in FUNCTIONS for param in cases_in_shards(function, FACTORS)),
    *(param for function in FUNCTIONS for param in cases_in_shards(function, FACTORS_OF_STATS, " with statistics")),
    *(param for function in LOG_PROBS for param in cases_in_shards(function, FACTORS_OF_LOG_PROBS)),
    *saturated_cases(),
]


@pytest.mark.parametrize(("case", "way"), MATRIX)
def test_shards_equal_the_whole_vocabulary(pool: Pool, case: Case, way: Way) -> None:
    judged_beside_the_whole(pool, case, way)


@pytest.mark.parametrize(
    *crossed(shape=[name for name in SHAPES if "beyond" not in name], function=FUNCTIONS, reduction=("mean", "none"))
)
def test_shapes(pool: Pool, shape: str, function: str, reduction: str) -> None:
    case = replace(SHAPES[shape], function=function, dtype="float32", reduction=reduction)
    ranks = RANKS[-1]
    judged(pool, case, Way(ranks, cut("even", case.vocabulary, ranks)))


@pytest.mark.parametrize(
    ("function", "reduction", "dtype"),
    [
        ("cross_entropy", "mean", "float16"),
        ("cross_entropy", "none", "float32"),
        ("linear_cross_entropy", "none", "float32"),
        ("linear_cross_entropy", "mean", "bfloat16"),
    ],
)
def test_compiled_graphs(pool: Pool, function: str, reduction: str, dtype: str) -> None:
    stats = ("lse", "nll", "entropy") if reduction == "none" else ()
    case = Case(function, (3, 7), 67, dtype, "", OPTIONS["all"], reduction=reduction, stats=stats)
    way = Way(2, cut("uneven", 67, 2))
    eager, compiled = joined(pool, case, way), joined(pool, case, replace(way, compiled=True))
    assert eager.keys() == compiled.keys()
    for name, expected in eager.items():
        np.testing.assert_array_equal(compiled[name], expected, err_msg=name)
