"""The matrix has every two options in every dtype, every three in some dtype, and every shape in every dtype."""

from itertools import combinations, product

import pytest

from tests.cases import DTYPES, FUNCTIONS, covering_cases
from tests.covering import SLOW, combinations_of, covering
from xent.command.check.case import Case


def values_of(case: Case) -> dict[str, str]:
    """Return the settings of a case, derived from its fields."""
    settings = {"reduction": case.reduction, "normalizer": None, "bias": case.bias, "shift": case.shift}
    off = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0, "weight": False}
    off |= {"sample_weight": False, "probabilities": False, "ignore_index": -100}
    found = {name: str(value) for name, value in (settings | off | case.options).items()}
    found["reduction"] += f", {found.pop('normalizer')}"
    found["target"] = f"{found.pop('probabilities')}, {found.pop('ignore_index')}"
    return found


def combinations_in(rows: list[dict[str, str]], strength: int) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(some) for row in rows for some in combinations(sorted(row.items()), strength)}


def every_combination(rows: list[dict[str, str]], strength: int) -> set[frozenset[tuple[str, str]]]:
    values = {name: sorted({row[name] for row in rows}) for name in sorted(rows[0])}
    return {
        frozenset(zip(names, some, strict=True))
        for names in combinations(values, strength)
        for some in product(*(values[name] for name in names))
    }


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_two_options_meet_in_every_dtype_and_every_three_in_some(function: str) -> None:
    """With slow kernels every option in every dtype, and every two in some."""
    rows = {dtype: [values_of(case) for case in covering_cases(function, dtype)] for dtype in DTYPES}
    for dtype in DTYPES:
        assert combinations_in(rows[dtype], 2 - SLOW) == every_combination(rows[dtype], 2 - SLOW)
    narrow = [row for dtype in DTYPES[1:] for row in rows[dtype]]
    assert combinations_in(narrow, 3 - SLOW) == every_combination(narrow, 3 - SLOW)
    expected = {"reduction": 5, "target": 3, "label_smoothing": 3, "logit_scale": 3}
    for name in narrow[0]:
        if function == "linear_cross_entropy" or name not in ("bias", "shift"):
            assert len({row[name] for row in narrow}) == expected.get(name, 2), name


@pytest.mark.parametrize("costly", ["", "c"])
@pytest.mark.parametrize("strength", [1, 2, 3])
def test_covering_set_is_small_and_the_same_for_a_seed(strength: int, costly: str) -> None:
    factors = {"a": "01", "b": "012", "c": "01", "d": "0123", "e": "01"}
    rows = covering(factors, strength, "a seed", costly)
    numbers = [{name: values.index(row[name]) for name, values in factors.items()} for row in rows]
    found = {frozenset(some) for row in numbers for some in combinations(row.items(), strength)}
    assert found == set(combinations_of(factors, strength))
    assert len(rows) <= [4, 14, 36][strength - 1]
    assert rows == covering(factors, strength, "a seed", costly)
    assert not costly or sum(row["c"] == "1" for row in rows) <= [1, 4, 12][strength - 1]
    assert strength == 1 or rows != covering(factors, strength, "another")
