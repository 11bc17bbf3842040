"""Tests of the libraries that people train with: collected where transformers is installed, or asked for.

With XENT_TEST_INTEGRATIONS=1, which nox sets, a missing library fails the run.
"""

import importlib.util
import os
from pathlib import Path

import pytest

LIBRARIES = ("transformers", "accelerate", "peft")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out of sessions that have none of the libraries."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("XENT_TEST_INTEGRATIONS") == "1":
        raise pytest.UsageError(f"XENT_TEST_INTEGRATIONS=1, and there is no {', '.join(missing)}")
    return True if missing else None
