"""These tests are about the Metal kernels; they are collected where backend "metal" was asked for."""

from pathlib import Path

import pytest

from tests.conftest import asked_for

_ONLY_EMULATED = ("test_compile.py", "test_emulator.py", "test_limits.py", "test_shaders.py", "test_sources.py")
_ONLY_REAL = ("test_gpu.py",)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out of sessions for other backends; of the rest, what the kernels do not run on here."""
    if "metal" not in asked_for():
        return True
    import mlx.core as mx

    left_out = _ONLY_EMULATED if mx.metal.is_available() else _ONLY_REAL
    return True if collection_path.name in left_out else None


@pytest.fixture(scope="session")
def kernel_folder(pytestconfig: pytest.Config) -> Path:
    """Where compiled kernels are kept, for other processes and the next session too."""
    return Path(pytestconfig.cache.mkdir("metal"))
