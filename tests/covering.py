"""Covering arrays: few rows that contain all combinations of any two or three settings, instead of the full product.

A fault in the interaction of settings shows in every row with these settings, whatever the others are. Nearly all known
faults involve three settings or fewer. See D. R. Kuhn, D. R. Wallace and A. M. Gallo, "Software fault interactions and
implications for software testing", IEEE Transactions on Software Engineering 30 (2004).
"""

import os
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

__all__ = ["FULL", "SLOW", "combinations_of", "covering", "crossed", "dealt"]

FULL = os.environ.get("XENT_TEST_FULL") == "1"
"""Whether to run full products, and other tests that take too long for every contribution."""

SLOW = os.environ.get("TRITON_INTERPRET") == "1" or (
    os.environ.get("XENT_TEST_BACKENDS") == "metal" and sys.platform != "darwin"
)
"""Whether kernels are interpreted, a thousand times slower than on a GPU, or compiled one by one for an emulator."""

_CANDIDATES = 6

Row = dict[str, int]
"""Setting -> the index of its value."""
Combination = frozenset[tuple[str, int]]


def covering(factors: Mapping[str, Sequence[Any]], strength: int, seed: str, costly: str = "") -> list[dict[str, Any]]:
    """Return rows with one value per setting, which contain all combinations of any `strength` settings.

    The algorithm is greedy: until no combination is missing, it draws some random rows that each contain a missing one,
    and keeps the row with the most missing combinations. The same seed gives the same rows. A row then gets the first
    value of the setting `costly`, if no combination is missing without the row's own.
    """
    generator = random.Random(seed)
    missing = dict.fromkeys(combinations_of(factors, strength))  # ordered, unlike a set of strings
    rows = []
    while missing:
        left = list(missing)
        drawn = [_draw(factors, strength, missing, generator.choice(left), generator) for _ in range(_CANDIDATES)]
        best = max(drawn, key=lambda row: sum(found in missing for found in _within(row, strength)))
        for found in _within(best, strength):
            missing.pop(found, None)
        rows.append(best)
    for row in rows if costly else []:
        others = {found for other in rows if other is not row for found in _within(other, strength)}
        if others.issuperset(found for found in _within(row, strength) if costly in dict(found)):
            row[costly] = 0
    return [{name: factors[name][row[name]] for name in factors} for row in rows]


def combinations_of(factors: Mapping[str, Sequence[Any]], strength: int) -> list[Combination]:
    """Return all combinations of values of any `strength` settings, as indices."""
    return [
        frozenset(zip(names, values, strict=True))
        for names in combinations(factors, strength)
        for values in product(*(range(len(factors[name])) for name in names))
    ]


def _draw(
    factors: Mapping[str, Sequence[Any]],
    strength: int,
    missing: Mapping[Combination, None],
    begin: Combination,
    generator: random.Random,
) -> Row:
    """Complete the row `begin`: each further value is the one that adds the most missing combinations."""
    row = dict(begin)
    rest = [name for name in factors if name not in row]
    generator.shuffle(rest)
    for name in rest:
        values = list(range(len(factors[name])))
        generator.shuffle(values)
        others = list(combinations(row.items(), strength - 1))

        def gain(value: int, added: str = name, others: list[Any] = others) -> int:
            return sum(frozenset((*other, (added, value))) in missing for other in others)

        row[name] = max(values, key=gain)
    return row


def _within(row: Row, strength: int) -> list[Combination]:
    return [frozenset(items) for items in combinations(row.items(), strength)]


def crossed(costly: str = "", **factors: Iterable[Any]) -> tuple[str, list[Any]]:
    """Return arguments for `parametrize`: rows with every pair of values of two parameters, or the product if FULL.

    Where these pairs allow it, a row has the first value of the parameter `costly`.
    """
    return _parameters(factors, 2, costly)


def dealt(together: int = 1, /, **factors: Iterable[Any]) -> tuple[str, list[Any]]:
    """Return arguments for `parametrize`: the product, or with slow kernels rows with every value of a parameter.

    `together`: 2 for rows with every pair of values.
    """
    return _parameters(factors, together if SLOW else len(factors))


def _parameters(factors: Mapping[str, Iterable[Any]], strength: int, costly: str = "") -> tuple[str, list[Any]]:
    values = {name: tuple(some) for name, some in factors.items()}
    if FULL or strength == len(values):
        rows = list(product(*values.values()))
    else:
        rows = [tuple(row.values()) for row in covering(values, strength, ", ".join(factors), costly)]
    return ",".join(factors), [pytest.param(*row, id="-".join(str(value) for value in row)) for row in rows]
