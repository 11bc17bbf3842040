"""These tests are about the Triton backend alone; they are collected where it was asked for."""

from pathlib import Path

import pytest

from tests.conftest import asked_for


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out of sessions for other backends."""
    return None if "triton" in asked_for() else True
