"""Shards against the same call in one piece: results, every gradient, every statistic, equal bits on all ranks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cases import DTYPES, FACTORS, FACTORS_OF_LOG_PROBS, FACTORS_OF_STATS, FIELDS, FUNCTIONS, LOG_PROBS, OF_LINEAR
from tests.covering import FULL, covering, crossed
from tests.distributed.calls import Way, in_one_piece
from tests.distributed.cuts import CUTS, cut
from tests.distributed.judge import joined, judged
from tests.distributed.pool import PROCESSES, Pool
from xent.core.check.cases import OPTIONS, Case
from xent.core.check.shapes import SHAPES

RANKS = tuple(ranks for ranks in (2, 3) if ranks <= PROCESSES)
WIDE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""How far statistics, of logits that are rounded once more or less, may be apart."""
SETTINGS: dict[str, tuple[Any, ...]] = {"dtype": DTYPES, "ranks": RANKS, "cut": CUTS, "reports": (False, True)}
OF_LINEAR_WAYS: dict[str, tuple[Any, ...]] = {
    "workspace": ({}, {"workspace": 67 * 4 * 14}),
    "needs": ((True, True, True), (True, False, False), (False, True, True)),
    "sequence_parallel": (False, True),
}


def _cases(function: str, factors: dict[str, Any], name: str = "") -> list[Any]:
    """Return cases and ways in which all pairs of settings occur."""
    is_linear = function.startswith("linear_")
    of_function = OF_LINEAR | OF_LINEAR_WAYS if is_linear else {"inplace": (False, True)} if "cross" in function else {}
    found = []
    for seed in range(3 if FULL else 1):
        for row in covering(SETTINGS | factors | of_function, 2, f"{function}{name} in shards, {seed}"):
            options = {name: value for part in row.values() if isinstance(part, dict) for name, value in part.items()}
            fields = {name: options.pop(name) for name in (*FIELDS, "workspace") if name in options}
            case = Case(function, (3, 7), 67, row["dtype"], "", options, **fields)
            way = Way(
                row["ranks"],
                cut(row["cut"], case.vocabulary, row["ranks"]),
                reports=row["reports"],
                needs=row.get("needs", (True,) * 3),
                inplace=row.get("inplace", False),
                sequence_parallel=row.get("sequence_parallel", False),
            )
            found.append(pytest.param(case, way, id=f"{case}{row['ranks']} ranks, {row['cut']}, {options | fields}"))
    return found


MATRIX = [
    *(param for function in FUNCTIONS for param in _cases(function, FACTORS)),
    *(param for function in FUNCTIONS for param in _cases(function, FACTORS_OF_STATS, " with statistics")),
    *(param for function in LOG_PROBS for param in _cases(function, FACTORS_OF_LOG_PROBS)),
]


@pytest.mark.parametrize(("case", "way"), MATRIX)
def test_shards_give_what_the_whole_gives(pool: Pool, case: Case, way: Way) -> None:
    found = judged(pool, case, way)
    whole = in_one_piece(case, replace(way, inplace=False))
    assert found.keys() == whole.keys()
    for name in found:
        if name.startswith("stats."):
            np.testing.assert_allclose(found[name], whole[name], rtol=WIDE[case.dtype], atol=WIDE[case.dtype])


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
