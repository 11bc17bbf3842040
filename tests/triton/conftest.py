"""Fixtures of the tests of the Triton backend, which are collected if XENT_TEST_BACKENDS names it."""

from pathlib import Path

import pytest

from tests.conftest import asked_for


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore this folder in runs for other backends."""
    return None if "triton" in asked_for() else True
