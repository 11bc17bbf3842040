"""Fixtures of the tests of the Triton backend, which are collected if XENT_TEST_BACKENDS names it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import asked_for


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore this folder in runs for other backends, and tests of the interpreter in runs on a GPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return None if "triton" in asked_for() and (interpreted or collection_path.name != "test_interpreter.py") else True


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the smallest blocks, of two vectors."""
    from xent.backends.triton import row_launches
    from xent.backends.triton.geometry import sizes
    from xent.backends.triton.launch import cdiv, next_power_of_2

    def cut(vocabulary: int, itemsize: int, place: Any, *more: bool) -> Any:
        block = 2 * max(place.vector, 4)
        found = sizes(vocabulary, itemsize, place, *more)
        return replace(
            found,
            block=block,
            lanes=block * found.lanes // found.block,
            blocks=next_power_of_2(cdiv(vocabulary, block)),
            whole=vocabulary % block == 0 and not place.skewed,
            options={"num_warps": 1},
        )

    monkeypatch.setattr(row_launches, "sizes", cut)
