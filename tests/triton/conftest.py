"""Fixtures of the tests of the Triton backend, which are collected if XENT_TEST_BACKENDS names it."""

import os
from pathlib import Path

import pytest

from tests.conftest import asked_for


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore this folder in runs for other backends, and tests of the interpreter in runs on a GPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return None if "triton" in asked_for() and (interpreted or collection_path.name != "test_interpreter.py") else True
