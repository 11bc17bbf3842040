"""These tests are about MLX alone; they are collected where a backend for MLX arrays was asked for."""

from pathlib import Path

import pytest

from tests.conftest import asked_for
from xent.backends import TABLE


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out of sessions for other frameworks."""
    wanted = any(TABLE[name]().framework == "mlx" for name in asked_for())
    return None if wanted else True
