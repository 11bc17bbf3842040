"""These tests are about the Metal kernels; they are collected where backend "metal" was asked for."""

from pathlib import Path

import pytest

from tests.conftest import asked_for


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out of sessions for other backends."""
    return None if "metal" in asked_for() else True


@pytest.fixture(scope="session")
def kernel_folder(pytestconfig: pytest.Config) -> Path:
    """Where compiled kernels are kept, for other processes and the next session too."""
    return Path(pytestconfig.cache.mkdir("metal"))
