"""All folders and files of src are installed."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.contents import missing
from tests.packaging.tree import ROOT, SOURCE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = {path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(SOURCE, tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD], cwd=tree, check=True, capture_output=True)
    (built,) = (tree / "dist").iterdir()
    return built


def test_packages_are_the_folders_with_code() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {path.parent for path in FILES if path.suffix == ".py"}
    assert setuptools["packages"] == sorted(".".join(("xent", *folder.parts)) for folder in folders)


def test_every_package_has_an_init() -> None:
    assert {path.parent for path in FILES if path.suffix == ".py"} == {
        path.parent for path in FILES if path.name == "__init__.py"
    }


def test_wheel_holds_every_file(wheel: Path) -> None:
    assert missing(wheel) == []
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("xent/__pycache__/api.pyc", "")
    assert missing(wheel) == ["holds xent/__pycache__/api.pyc"]


def test_wheel_imports(wheel: Path) -> None:
    source = f"import sys; sys.path.insert(0, {str(wheel)!r}); import xent; print(xent.__file__)"
    run = subprocess.run([sys.executable, "-c", source], cwd=wheel.parent, check=True, capture_output=True, text=True)
    assert Path(run.stdout.strip()).is_relative_to(wheel)
