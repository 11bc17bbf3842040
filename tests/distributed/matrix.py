"""Cases of a vocabulary in shards, and the ways to run them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.cases import DTYPES, FIELDS, OF_LINEAR
from tests.covering import FULL, SLOW, covering
from tests.distributed.calls import Way
from tests.distributed.cuts import CUTS, cut
from tests.distributed.pool import PROCESSES
from xent.command.check.case import Case
from xent.core.spec import DIFFERENTIABLE

__all__ = ["RANKS", "cases_in_shards", "saturated_cases"]

RANKS = tuple(ranks for ranks in (2, 3) if ranks <= PROCESSES)
SETTINGS: dict[str, tuple[Any, ...]] = {"ranks": RANKS, "cut": CUTS, "reports": (False, True)}
OF_LINEAR_WAYS: dict[str, tuple[Any, ...]] = {
    "workspace": ({}, {"workspace": 67 * 4 * 14}),
    "needs": ((True, True, True), (True, False, False), (False, True, True)),
    "sequence_parallel": (False, True),
}

_ROWS, _CLASSES = (3, 7), 67
_CAPPED = {"softcap": 3.0}
_SATURATED = (
    Case("cross_entropy", _ROWS, _CLASSES, "float32", "one launch", _CAPPED),
    Case("cross_entropy", _ROWS, _CLASSES, "float32", "saved", _CAPPED, "none"),
    Case(
        "cross_entropy",
        _ROWS,
        _CLASSES,
        "float32",
        "statistics",
        _CAPPED | {"logit_scale": -0.7, "weight": True, "label_smoothing": 0.1},
        "none",
        stats=DIFFERENTIABLE,
    ),
    Case("cross_entropy", _ROWS, _CLASSES, "float32", "probabilities", _CAPPED | {"probabilities": True}),
    Case("linear_cross_entropy", _ROWS, _CLASSES, "float32", "shift", _CAPPED, bias=True, shift=2),
    Case("linear_cross_entropy", _ROWS, _CLASSES, "float32", "saved", _CAPPED, "none", bias=True),
    Case("log_probs", _ROWS, _CLASSES, "float32", "temperature", _CAPPED | {"temperature": "rows"}, "none"),
    Case("log_probs", _ROWS, _CLASSES, "float32", "support", _CAPPED | {"support": True}, "none", entropy=True),
    Case("linear_log_probs", _ROWS, _CLASSES, "float32", "shift", _CAPPED, "none", bias=True, shift=2),
)


def cases_in_shards(
    function: str,
    factors: dict[str, Any],
    name: str = "",
    backend: str = "torch",
    dtypes: tuple[str, ...] = DTYPES,
    together: int = 2,
) -> list[Any]:
    """Return cases and ways with every combination of `together` settings."""
    is_linear = function.startswith("linear_")
    of_function = OF_LINEAR | OF_LINEAR_WAYS if is_linear else {"inplace": (False, True)} if "cross" in function else {}
    factors = {"dtype": dtypes} | SETTINGS | factors | of_function
    found = []
    for seed in range(3 if FULL else 1):
        for row in covering(factors, together, f"{function}{name} in shards, {seed}"):
            options = {name: value for part in row.values() if isinstance(part, dict) for name, value in part.items()}
            fields = {name: options.pop(name) for name in (*FIELDS, "workspace") if name in options}
            case = Case(function, (3, 7), 67, row["dtype"], "", options, **fields)
            way = Way(
                row["ranks"],
                cut(row["cut"], case.vocabulary, row["ranks"]),
                backend,
                reports=row["reports"],
                needs=row.get("needs", (True,) * 3),
                inplace=row.get("inplace", False),
                sequence_parallel=row.get("sequence_parallel", False),
            )
            found.append(pytest.param(case, way, id=f"{case}{row['ranks']} ranks, {row['cut']}, {options | fields}"))
    return found


def saturated_cases(backend: str = "torch") -> list[Any]:
    """Return cases and ways with most logits far above the softcap, and with an empty shard.

    There, dx/dz is the small difference of 1 and tanh^2. Each case has several draws, as not every draw has a target
    whose gradient shows a rounding error of x.
    """
    way = Way(RANKS[-1], cut("empty", _CLASSES, RANKS[-1]), backend)
    return [
        pytest.param(replace(case, offset=8.0), replace(way, seed=seed), id=f"{case}, saturated, {seed}")
        for case in _SATURATED
        for seed in range(1 if SLOW else 3)
    ]
