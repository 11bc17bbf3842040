"""The source tree of the package, for tests that compare it with other files."""

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

__all__ = ["MODULES", "ROOT", "SOURCE", "load", "skip_without"]

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


def _dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("xent", *parts)).removesuffix(".__init__")


MODULES = {_dotted(path): path for path in sorted(SOURCE.rglob("*.py"))}


def load(name: str) -> ModuleType:
    """Import a module of the package; skip the test if it needs a missing framework that is not under test."""
    try:
        importlib.import_module(name.rpartition(".")[0] or name)  # which may fail after it has imported the module
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        skip_without(error)
        raise
    except ImportError as error:
        if "gluon" in str(error.name):  # Triton 3.4 lacks what the kernel for Hopper needs
            pytest.skip(str(error))
        raise


def skip_without(error: ModuleNotFoundError) -> None:
    """Skip the test if the missing module is a framework that is not under test."""
    framework = (error.name or "").partition(".")[0]
    asked_for = [name.strip() for name in os.environ.get("XENT_TEST_BACKENDS", "").split(",")]
    if framework != "xent" and framework not in asked_for:
        pytest.skip(f"needs {framework}, which is not installed")
