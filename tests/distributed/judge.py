"""Combine the results of all ranks, and compare them with the float64 reference as for one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.distributed.calls import AXES, Way, in_one_piece, in_shards
from tests.distributed.pool import Pool
from tests.targets import backend_of
from xent.command.check.case import Case
from xent.command.check.harnesses import harness_of
from xent.command.check.judge import Comparison, compare, results_of_case, worst_of

__all__ = ["joined", "judged", "judged_beside_the_whole"]

DRAWS = 8
WIDE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""Tolerance of statistics, whose logits may be rounded once more or less."""


def judged(pool: Pool, case: Case, way: Way, run: Callable[..., Any] = in_shards, *more: Any) -> dict[str, Any]:
    """Return the combined results of all ranks after comparing them with the reference as `judge_case` does."""
    found, comparisons = drawn(pool, case, way, run, *more)
    if not all(comparison.passed for comparison in comparisons):
        draws = [comparisons, *(drawn(pool, case, replace(way, seed=seed), run, *more)[1] for seed in range(1, DRAWS))]
        comparisons = [worst_of(same) for same in zip(*draws, strict=True)]
    for comparison in comparisons:
        assert comparison.passed, comparison
    return found


def judged_beside_the_whole(pool: Pool, case: Case, way: Way) -> None:
    """Judge the results, and compare all statistics with those of a call on the whole vocabulary."""
    found = judged(pool, case, way)
    whole = in_one_piece(case, replace(way, inplace=False))
    assert found.keys() == whole.keys()
    for name in found:
        if name.startswith("stats."):
            np.testing.assert_allclose(found[name], whole[name], rtol=WIDE[case.dtype], atol=WIDE[case.dtype])


def drawn(
    pool: Pool, case: Case, way: Way, run: Callable[..., Any], *more: Any
) -> tuple[dict[str, Any], list[Comparison]]:
    """Return the results for one draw of the inputs, and their comparisons with the reference."""
    found = joined(pool, case, way, run, *more)
    backend = backend_of("torch")
    truth, _, plain, sizes = results_of_case(backend, harness_of(backend), case, way.seed)
    names = sorted(found.keys() & truth.keys())
    assert set(names) >= set(case.results)
    return found, [compare(name, found[name], truth[name], plain[name], case, sizes.get(name)) for name in names]


def joined(pool: Pool, case: Case, way: Way, run: Callable[..., Any] = in_shards, *more: Any) -> dict[str, Any]:
    """Combine the results of all ranks. What every rank should have must have the same bits on all ranks."""
    parts = pool.run(run, case, way, *more)[: way.ranks]
    found = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if name in AXES:
            found[name] = way.cut.join(values, AXES[name])
        elif name == "input" and way.sequence_parallel:
            found[name] = np.concatenate(values, -2)
        else:
            for value in values[1:]:
                np.testing.assert_array_equal(value, values[0], err_msg=f"{name} differs between ranks")
            found[name] = values[0]
    return found
