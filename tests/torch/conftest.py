"""Fixtures of the tests for PyTorch, which are collected if XENT_TEST_BACKENDS names a PyTorch backend."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import asked_for
from tests.targets import Target, backend_of

if TYPE_CHECKING:
    from torch import Tensor


_OF_ONE_BACKEND = ("test_check.py", "test_many_classes.py")
"""Files whose calls go to backend "torch", whatever backend the run is for."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore this folder in runs for other frameworks, and files of one backend in runs for others."""
    wanted = any(backend_of(name).framework == "torch" for name in asked_for())
    return None if wanted and (collection_path.name not in _OF_ONE_BACKEND or "torch" in asked_for()) else True


@pytest.fixture(autouse=True)
def no_transform_left() -> Iterator[None]:
    """Leave transforms that PyTorch did not leave after an error in a compiled graph."""
    import torch

    yield
    if torch._C._functorch.maybe_current_level() is not None:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)
    torch._C._autograd._saved_tensors_hooks_enable()


@pytest.fixture
def tensors(target: Target) -> "dict[str, Tensor]":
    """Return tensors of 6 rows and 11 classes on the target's device."""
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = {
        "logits": 2 * torch.randn(6, 11, generator=generator),
        "input": torch.randn(6, 8, generator=generator),
        "linear_weight": torch.randn(11, 8, generator=generator),
        "linear_bias": torch.randn(11, generator=generator),
        "target": torch.randint(11, (6,), generator=generator),
        "sample_weight": torch.rand(6, generator=generator),
        "teacher_input": torch.randn(6, 5, generator=generator),
        "teacher_weight": torch.randn(11, 5, generator=generator),
    }
    return {name: tensor.to(target.device) for name, tensor in drawn.items()}
