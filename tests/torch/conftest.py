"""These tests are about PyTorch alone; they are collected where a PyTorch backend was asked for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import asked_for
from xent.backends import TABLE


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out of sessions for other frameworks."""
    wanted = any(TABLE[name]().framework == "torch" for name in asked_for())
    return None if wanted else True


@pytest.fixture(autouse=True)
def no_transform_left() -> Iterator[None]:
    """Leave the transforms of a compiled graph in which a test made an error: PyTorch stays inside of them."""
    import torch

    yield
    if torch._C._functorch.maybe_current_level() is not None:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)
    torch._C._autograd._saved_tensors_hooks_enable()
