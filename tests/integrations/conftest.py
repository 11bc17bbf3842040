"""Fixtures of the integration tests, which are collected only if their libraries are installed.

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
    "test_trl_functions.py": "trl",
}
"""Test file -> what it needs besides PyTorch and transformers; mlx-lm installs transformers without PyTorch."""
FROM_PYTHON = {"trl": (3, 11)}
"""Library -> the oldest Python that it supports, if that is newer than xent's."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore test files whose libraries are not installed."""
    needed = {"torch", "transformers", NEEDS.get(collection_path.name, "transformers")}
    missing = [name for name in sorted(needed) if importlib.util.find_spec(name) is None]
    expected = all(sys.version_info >= FROM_PYTHON.get(name, (3,)) for name in missing)
    if missing and expected and os.environ.get("XENT_TEST_INTEGRATIONS") == "1":
        raise pytest.UsageError(f"XENT_TEST_INTEGRATIONS=1, and there is no {', '.join(missing)}")
    return True if missing else None


@pytest.fixture(autouse=True)
def float32_products() -> Iterator[None]:
    """Restore the TF32 setting that the Trainer changes for the whole process when it compiles."""
    from tests.integrations.precision import multiply_in_float32

    yield
    multiply_in_float32()


def shapes_of(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[int, ...]]:
    """Return a list to which calls of functions of xent append the shapes of their hidden states."""
    shapes = []

    def watch(function: Any) -> Any:
        def watched(input: Any, *args: Any, **kwargs: Any) -> Any:
            shapes.append(tuple(input.shape))
            return function(input, *args, **kwargs)

        return watched

    for name in names:
        monkeypatch.setattr(xent, name, watch(getattr(xent, name)))
    return shapes


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list of the shapes of hidden states with a fused loss."""
    return shapes_of(monkeypatch, "linear_cross_entropy")
