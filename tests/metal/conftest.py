"""These tests are about the Metal kernels; they are collected where backend "metal" was asked for."""

from pathlib import Path

import pytest

from tests.conftest import asked_for

_EMULATED = ("test_emulator.py", "test_sources.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out of sessions for other backends, and what is about the emulator where there is Metal."""
    if "metal" not in asked_for():
        return True
    import mlx.core as mx

    return True if collection_path.name in _EMULATED and mx.metal.is_available() else None


@pytest.fixture(scope="session")
def kernel_folder(pytestconfig: pytest.Config) -> Path:
    """Where compiled kernels are kept, for other processes and the next session too."""
    return Path(pytestconfig.cache.mkdir("metal"))
