"""Fixtures of the tests for PyTorch, which are collected if XENT_TEST_BACKENDS names a PyTorch backend."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import asked_for
from xent.backends import TABLE


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore this folder in runs for other frameworks."""
    wanted = any(TABLE[name]().framework == "torch" for name in asked_for())
    return None if wanted else True


@pytest.fixture(autouse=True)
def no_transform_left() -> Iterator[None]:
    """Leave transforms that PyTorch did not leave after an error in a compiled graph."""
    import torch

    yield
    if torch._C._functorch.maybe_current_level() is not None:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)
    torch._C._autograd._saved_tensors_hooks_enable()
