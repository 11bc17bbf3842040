"""Shards against the same call in one piece: loss, every gradient, every statistic, equal bits on all ranks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cases import DTYPES, FACTORS, FUNCTIONS, OF_LINEAR, SHAPES
from tests.covering import FULL, covering, crossed
from tests.distributed.calls import AXES, FACTORS_OF_STATISTICS, Way, in_one_piece, in_shards
from tests.distributed.cuts import CUTS, cut
from tests.distributed.pool import PROCESSES, Pool
from xent.backends import TABLE
from xent.backends.reference import cross_entropy_gradient, linear_cross_entropy_gradients
from xent.core import validate
from xent.core.check.cases import Case, make_inputs
from xent.core.check.judge import compare, results_of_case
from xent.core.spec import STAT_NAMES

RANKS = tuple(ranks for ranks in (2, 3) if ranks <= PROCESSES)
STATS = tuple(name for name in STAT_NAMES if name not in ("log_sum_sq_probs", "mean_logit"))
WIDE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""How far statistics, of logits that are rounded once more or less, may be apart."""
SETTINGS: dict[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "ranks": RANKS,
    "cut": CUTS,
    "stats": ((), STATS),
}
OF_LINEAR_WAYS: dict[str, tuple[Any, ...]] = {
    "workspace": ({}, {"workspace": 67 * 4 * 14}),
    "needs": ((True, True, True), (True, False, False), (False, True, True)),
    "sequence_parallel": (False, True),
}


def _cases(function: str) -> list[Any]:
    """Return cases and ways in which all pairs of settings occur."""
    linear = OF_LINEAR | OF_LINEAR_WAYS if function == "linear_cross_entropy" else {"inplace": (False, True)}
    found = []
    for seed in range(3 if FULL else 1):
        for row in covering(SETTINGS | FACTORS | linear, 2, f"{function} in shards, {seed}"):
            settings = {
                name: value for part in (*FACTORS, *OF_LINEAR, "workspace") for name, value in row.get(part, {}).items()
            }
            fields = {
                name: settings.pop(name) for name in ("reduction", "bias", "shift", "workspace") if name in settings
            }
            case = Case(function, (3, 7), 67, row["dtype"], "", settings, **fields)
            way = Way(
                row["ranks"],
                cut(row["cut"], case.vocabulary, row["ranks"]),
                stats=row["stats"],
                needs=row.get("needs", (True,) * 3),
                inplace=row.get("inplace", False),
                sequence_parallel=row.get("sequence_parallel", False),
            )
            name = f"{case}{row['ranks']} ranks, {row['cut']}, {settings | fields}"
            found.append(pytest.param(case, way, id=name))
    return found


@pytest.mark.parametrize(("case", "way"), [param for function in FUNCTIONS for param in _cases(function)])
def test_shards_give_what_the_whole_gives(pool: Pool, case: Case, way: Way) -> None:
    found = joined(pool, case, way)
    backend = TABLE["torch"]()
    truth, _, plain = results_of_case(backend, backend.harness(), case)
    for name in found.keys() & truth.keys():
        comparison = compare(name, found[name], truth[name], plain[name], case)
        assert comparison.passed, comparison
    whole = in_one_piece(case, replace(way, inplace=False))
    assert found.keys() == whole.keys()
    for name in (f"stats.{name}" for name in way.stats):
        np.testing.assert_allclose(found[name], whole[name], rtol=WIDE[case.dtype], atol=WIDE[case.dtype])


def joined(pool: Pool, case: Case, way: Way) -> dict[str, Any]:
    """Return the results of all ranks as those of one call, what all should have having the same bits on all."""
    parts = pool.run(in_shards, case, way)[: way.ranks]
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


@pytest.mark.parametrize(
    *crossed(shape=[name for name in SHAPES if "beyond" not in name], function=FUNCTIONS, reduction=("mean", "none"))
)
def test_shapes(pool: Pool, shape: str, function: str, reduction: str) -> None:
    case = replace(SHAPES[shape], function=function, dtype="float32", reduction=reduction)
    ranks = RANKS[-1]
    found = joined(pool, case, Way(ranks, cut("even", case.vocabulary, ranks)))
    backend = TABLE["torch"]()
    truth, _, plain = results_of_case(backend, backend.harness(), case)
    for name in truth:
        comparison = compare(name, found[name], truth[name], plain[name], case)
        assert comparison.passed, comparison


@pytest.mark.parametrize("given", [{}, {"probabilities": True}], ids=["classes", "probabilities"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_through_statistics(pool: Pool, function: str, given: dict[str, Any]) -> None:
    options = given | {"weight": True, "label_smoothing": 0.1, "z_loss": 0.02, "softcap": 5.0, "sample_weight": True}
    case = Case(function, (3, 7), 67, "float64", "", options, reduction="none", workspace=67 * 8 * 14)
    stats = ("lse", "nll", "entropy")
    found = joined(pool, case, Way(2, cut("uneven", 67, 2), stats=stats, through_statistics=True))
    inputs = make_inputs(case)
    upstream = inputs.upstream
    others = {name: np.flip(upstream) * factor for name, factor in FACTORS_OF_STATISTICS.items()}
    loss = {"weight": None, "sample_weight": None, "normalizer": None, "ignore_index": -100, "logit_scale": 1.0}
    loss |= {"reduction": "none", "stats": (), **inputs.options}
    expected: Any
    if function == "cross_entropy":
        call = validate.logits_call(**inputs.differentiable, target=inputs.target, axis=-1, inplace=False, **loss)
        expected = {"logits": cross_entropy_gradient(call, upstream, **others)}
    else:
        arrays = {"linear_bias": None} | inputs.differentiable
        linear = validate.linear_call(**arrays, target=inputs.target, shift=0, workspace=None, **loss)
        made = linear_cross_entropy_gradients(linear, upstream, **others)
        expected = dict(zip(("input", "linear_weight"), made, strict=False))
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    *crossed(function=FUNCTIONS, reduction=("mean", "none"), dtype=("float32", "float16"), given=(False, True))
)
def test_compiled_graphs(pool: Pool, function: str, reduction: str, dtype: str, given: bool) -> None:
    options = {"probabilities": given, "weight": True, "label_smoothing": 0.1, "softcap": 5.0}
    case = Case(function, (3, 7), 67, dtype, "", options, reduction=reduction)
    through = ("lse", "nll", "entropy") if reduction == "none" else ()
    way = Way(2, cut("uneven", 67, 2), stats=through, through_statistics=bool(through))
    eager, compiled = joined(pool, case, way), joined(pool, case, replace(way, compiled=True))
    assert eager.keys() == compiled.keys()
    for name, expected in eager.items():
        np.testing.assert_array_equal(compiled[name], expected, err_msg=name)
