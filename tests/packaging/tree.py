"""The package as it lies in this checkout, for the tests that compare it with something else."""

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

__all__ = ["MODULES", "ROOT", "SOURCE", "load"]

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


def _dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("xent", *parts)).removesuffix(".__init__")


MODULES = {_dotted(path): path for path in sorted(SOURCE.rglob("*.py"))}


def load(name: str) -> ModuleType:
    """Import a module of the package; skip the test if a framework is missing that this run did not ask for."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        framework = (error.name or "").partition(".")[0]
        if framework == "xent" or framework in os.environ.get("XENT_TEST_BACKENDS", "").split(","):
            raise
        pytest.skip(f"{name} needs {framework}, which is not installed")
