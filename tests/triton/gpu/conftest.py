"""Fixtures of the tests of streams, memory and compiled kernels, which are collected only if Triton compiles for a GPU.

No test is skipped. Without a GPU, or with Triton's interpreter, these tests are not collected. Tests for two GPUs are
not collected if there is only one.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.targets import Target, backend_of


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the folder if kernels are interpreted, and tests for two GPUs if there is one."""
    compiled = backend_of("triton").info().devices == ("cuda",)
    enough = collection_path.name != "test_devices.py" or torch.cuda.device_count() > 1
    return None if compiled and enough else True


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory with NaN."""
    with Target("triton", "cuda").poisoned():
        yield


@pytest.fixture(autouse=True)
def returned_memory() -> Iterator[None]:
    """Release memory after a test, so that other processes can use it."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
