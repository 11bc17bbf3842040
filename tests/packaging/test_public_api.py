"""`__all__` matches the contents of every module, and the public names of xent are documented."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

import pytest

import xent
from tests.packaging.tree import MODULES, ROOT, load


def _declared(tree: ast.Module) -> list[str]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))
    raise AssertionError("the module defines no __all__")


def _public_definitions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


@pytest.mark.parametrize("name", MODULES)
def test_all_lists_what_the_module_defines(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    declared = _declared(tree)
    assert len(set(declared)) == len(declared)
    assert set(_public_definitions(tree)) <= set(declared)


@pytest.mark.parametrize("name", MODULES)
def test_names_in_all_exist(name: str) -> None:
    module = load(name)
    assert [listed for listed in module.__all__ if not hasattr(module, listed)] == []


def test_public_names_are_all_and_nothing_else() -> None:
    subpackages = {module.name for module in pkgutil.iter_modules(xent.__path__)}
    names = {name for name in vars(xent) if not name.startswith("_")} - subpackages
    assert names | {"backends", "__version__"} == set(xent.__all__)


def test_reference_pages_have_every_public_name() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    documented = re.findall(r"^\.\. auto\w+:: xent\.(\w+)$", pages, flags=re.MULTILINE)
    assert sorted(documented) == sorted(set(xent.__all__) - {"__version__"})


def test_stub_has_the_arguments_of_the_functions() -> None:
    tree = ast.parse((ROOT / "src" / "__init__.pyi").read_text(encoding="utf-8"))
    fields = {"TypedDict": []}
    checked = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            own = [ast.unparse(line.target) for line in node.body if isinstance(line, ast.AnnAssign)]
            fields[node.name] = own + [name for base in node.bases for name in fields.get(ast.unparse(base), [])]
        elif isinstance(node, ast.FunctionDef) and node.args.kwarg is not None:
            assert isinstance(node.args.kwarg.annotation, ast.Subscript)
            named = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
            named += fields[ast.unparse(node.args.kwarg.annotation.slice)]
            assert sorted(named) == sorted(inspect.signature(getattr(xent, node.name)).parameters), node.name
            checked.add(node.name)
    assert checked | {"backends"} == {name for name in xent.__all__ if inspect.isfunction(getattr(xent, name))}


def test_backends_stays_a_function() -> None:
    importlib.import_module("xent.backends.reference")
    assert inspect.isfunction(xent.backends)


def test_modules_of_backends_can_be_imported_by_their_names() -> None:
    import xent.backends.protocol
    import xent.backends.reference as reference

    assert xent.backends.reference is reference  # type: ignore[attr-defined]
    assert xent.backends.protocol.Backend  # type: ignore[attr-defined]
    assert xent.backends()[-1].name == reference.BACKEND.name
