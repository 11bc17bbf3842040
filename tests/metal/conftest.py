"""Fixtures of the tests of the Metal kernels, which are collected if XENT_TEST_BACKENDS names backend "metal"."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import asked_for

_ONLY_EMULATED = ("test_compile.py", "test_emulator.py", "test_limits.py", "test_shaders.py", "test_sources.py")
_ONLY_REAL = ("test_gpu.py",)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore this folder in runs for other backends, and files that the present machine cannot run."""
    if "metal" not in asked_for():
        return True
    import mlx.core as mx

    left_out = _ONLY_EMULATED if mx.metal.is_available() else _ONLY_REAL
    return True if collection_path.name in left_out else None


@pytest.fixture(scope="session")
def kernel_folder(pytestconfig: pytest.Config) -> Path:
    """Return the folder of compiled kernels."""
    from tests.metal.emulator.install import folder_of

    return folder_of(pytestconfig)


def _forget() -> None:
    from xent.backends.metal import rows, sources, torch_steps

    sources.mlx_kernel.cache_clear()
    for remembered in (rows._tried, torch_steps._compiled):
        remembered.clear()


@pytest.fixture
def emulator(kernel_folder: Path) -> Iterator[Any]:
    """Return a new emulator, so that all kernels are built again."""
    import mlx.core as mx
    import torch

    from tests.metal.emulator import install

    before = mx.fast.metal_kernel, torch.mps.compile_shader
    _forget()
    yield install.install(kernel_folder)
    mx.fast.metal_kernel, torch.mps.compile_shader = before
    _forget()
