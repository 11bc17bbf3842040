"""The instructions for adding a device name only modules, classes, functions and files that exist."""

import ast
import re

import pytest

from tests.packaging.tree import MODULES, ROOT, SOURCE
from tests.quick import FOLDERS, chosen


def _names(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Return the names that statements define, each with its own body."""
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.body
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id: [] for target in targets if isinstance(target, ast.Name)}
    return found


def exists(name: str) -> bool:
    """Whether a dotted name is a module of the package, or defined in one."""
    module, parts = name, list[str]()
    while module not in MODULES:
        module, _, last = module.rpartition(".")
        parts.insert(0, last)
        if not module:
            return False
    body = ast.parse(MODULES[module].read_text(encoding="utf-8")).body
    for part in parts:
        names = _names(body)
        if part not in names:
            return False
        body = names[part]
    return True


CONTRACT = ast.get_docstring(ast.parse((SOURCE / "backends" / "protocol.py").read_text(encoding="utf-8"))) or ""


@pytest.mark.parametrize("name", re.findall(r"`(xent\.[\w.]+)`", CONTRACT))
def test_names_in_the_contract_exist(name: str) -> None:
    assert exists(name)


@pytest.mark.parametrize("name", re.findall(r"`(\w+\.metal)`", CONTRACT))
def test_metal_sources_in_the_contract_exist(name: str) -> None:
    assert (SOURCE / "backends" / "metal" / name).is_file()


def test_paths_in_the_instructions_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = {path for path in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.]*)`", text) if "NAME" not in path}
    assert paths
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_quick_chooses_tests_that_exist() -> None:
    assert [test for tests in FOLDERS.values() for test in tests if not (ROOT / test).is_file()] == []
    sessions = chosen(["src/integrations/trl.py", "benchmarks/cases.py", "tests/metal/test_rows.py"])
    assert sessions["tests-metal"] == ["tests/metal/test_rows.py"]
    integrations = {"test_trl.py", "test_trl_functions.py", "test_training_benchmark.py"}
    assert {f"tests/integrations/{name}" for name in integrations} < set(sessions["tests"])
