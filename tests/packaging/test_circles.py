"""There are no import cycles, including imports inside functions and under TYPE_CHECKING.

A folder counts as one unit, except `core`, whose files count separately: backends import its description of a call, and
its public functions import backends.
"""

import ast
import graphlib
from collections.abc import Callable

import pytest

from tests.packaging.tree import MODULES

Imports = dict[str, set[str]]
_FOLDERS = ("xent.backends", "xent.integrations")


def _imports(name: str) -> set[str]:
    """Return the modules of the package that a module imports anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports by a relative name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else str(node.module))
    return found & set(MODULES)


def _folder(name: str) -> str:
    """Return the folder of backends or integrations of a module, or the module itself."""
    parts = name.split(".")
    is_package = MODULES[name].name == "__init__.py"
    inside = ".".join(parts[:2]) in _FOLDERS and len(parts) + is_package > 3
    return ".".join(parts[:3]) if inside else name


def circle(imports: Imports) -> list[str]:
    """Return modules that form an import cycle, or an empty result."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("unit", [str, _folder], ids=["files", "folders"])
def test_there_are_no_import_cycles(unit: Callable[[str], str]) -> None:
    graph = {}
    for name in MODULES:
        graph.setdefault(unit(name), set()).update(map(unit, _imports(name)))
    assert circle({name: imported - {name} for name, imported in graph.items()}) == []
