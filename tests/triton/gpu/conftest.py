"""These tests are about streams, memory and compiled kernels; they are collected where Triton compiles for a GPU.

Nothing here is skipped: where there is no GPU, or Triton interprets, these tests are not there, as those for two GPUs
are not where there is one.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.targets import Target
from xent.backends.triton import BACKEND


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out where kernels are interpreted; leave out what needs two GPUs where there is one."""
    compiled = BACKEND.info().devices == ("cuda",)
    enough = collection_path.name != "test_devices.py" or torch.cuda.device_count() > 1
    return None if compiled and enough else True


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill unwritten memory with NaN."""
    with Target("triton", "cuda").poisoned():
        yield


@pytest.fixture(autouse=True)
def returned_memory() -> Iterator[None]:
    """Give memory back after a test, so that other processes can have what a large one took."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
