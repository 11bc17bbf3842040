"""Fixtures of the distributed tests, which are for PyTorch only and share one group of processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import asked_for
from tests.targets import backend_of


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore this folder in runs for other frameworks, and if PyTorch has no torch.distributed."""
    if not any(backend_of(name).framework == "torch" for name in asked_for()):
        return True
    import torch.distributed as dist

    return None if dist.is_available() else True


@pytest.fixture(scope="session")
def pool() -> Iterator[object]:
    """Start the processes when the first test needs them."""
    from tests.distributed.pool import Pool

    processes = Pool()
    yield processes
    processes.stop()
