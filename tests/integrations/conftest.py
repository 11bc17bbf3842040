"""Tests of the libraries that people train with: collected where those are installed.

With XENT_TEST_INTEGRATIONS=1, which nox sets, a missing library fails the run.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import xent

NEEDS = {
    "test_memory.py": "accelerate",
    "test_trainer.py": "accelerate",
    "test_peft.py": "peft",
    "test_trl.py": "trl",
    "test_trl_divergence.py": "trl",
    "test_trl_functions.py": "trl",
}
"""What a file needs besides PyTorch and transformers, which mlx-lm brings without PyTorch."""
FROM_PYTHON = {"trl": (3, 11)}
"""The first Python that a library runs on, where that is later than ours."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what tests a library that is not there."""
    needed = {"torch", "transformers", NEEDS.get(collection_path.name, "transformers")}
    missing = [name for name in sorted(needed) if importlib.util.find_spec(name) is None]
    expected = all(sys.version_info >= FROM_PYTHON.get(name, (3,)) for name in missing)
    if missing and expected and os.environ.get("XENT_TEST_INTEGRATIONS") == "1":
        raise pytest.UsageError(f"XENT_TEST_INTEGRATIONS=1, and there is no {', '.join(missing)}")
    return True if missing else None


@pytest.fixture(autouse=True)
def float32_products() -> Iterator[None]:
    """Take back the TF32 that the Trainer turns on for good where it compiles."""
    from tests.integrations.precision import multiply_in_float32

    yield
    multiply_in_float32()


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that an earlier test compiled a patched model: in such a process a step past the head is no sign."""
    from xent.integrations.transformers import history

    monkeypatch.setattr(history, "_compiled", set())


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of the hidden states whose loss was fused, as they come."""
    shapes: list[tuple[int, ...]] = []
    function = xent.linear_cross_entropy

    def watched(input: Any, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(input.shape))
        return function(input, *args, **kwargs)

    monkeypatch.setattr(xent, "linear_cross_entropy", watched)
    return shapes
