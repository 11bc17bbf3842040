"""Fixtures of the tests for MLX, which are collected if XENT_TEST_BACKENDS names a backend for MLX arrays."""

from pathlib import Path

import pytest

from tests.conftest import asked_for
from tests.targets import backend_of


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore this folder in runs for other frameworks."""
    wanted = any(backend_of(name).framework == "mlx" for name in asked_for())
    return None if wanted else True
