"""Fixtures of the tests of the Triton backend, which are collected if XENT_TEST_BACKENDS names it."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import asked_for


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore this folder in runs for other backends, and tests of the interpreter in runs on a GPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return None if "triton" in asked_for() and (interpreted or collection_path.name != "test_interpreter.py") else True


@pytest.fixture
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the smallest blocks, of two vectors; with a parameter, so many programs share a row where programs may."""
    from xent.backends.triton import row_launches
    from xent.backends.triton.geometry import in_blocks

    def cut(
        vocabulary: int, itemsize: int, place: Any, writes: bool, predicts: bool, capped: bool, shares: bool
    ) -> Any:
        block = 2 * max(place.vector, 4)
        parts = getattr(request, "param", 1) if shares and writes and place.vector > 1 else 1
        while True:  # as with long rows: programs with one block each, or more than one
            size = in_blocks(vocabulary, place, block, parts, place.vector, {"num_warps": 1})
            if vocabulary - (parts - 1) * size.share >= (block if size.share > block else 1):
                return size
            parts //= 2

    monkeypatch.setattr(row_launches, "sizes", cut)
