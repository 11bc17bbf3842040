"""All examples run: Python blocks in the documents and examples in docstrings."""

import doctest
import inspect
import re
import unittest
from contextlib import suppress
from pathlib import Path

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

import xent
from tests.packaging.tree import MODULES, ROOT, load, skip_without

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]
SYBIL = Sybil(parsers=[PythonCodeBlockParser(doctest_optionflags=OPTIONS), SkipParser()])
WITHOUT_FRAMEWORK: set[str] = set()
EVALUATED: list[Example] = []
BLOCKS = {
    f"{path.relative_to(ROOT)}:{block.line}": block for path in DOCUMENTS for block in SYBIL.parse(path).examples()
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_document_block_runs(block: Example) -> None:
    """Run earlier blocks of the document too, because blocks share names and another process may have run them."""
    for earlier in BLOCKS.values():
        if earlier is block:
            break
        if earlier.path == block.path and earlier not in EVALUATED:
            with suppress(NameError, unittest.SkipTest, pytest.skip.Exception):
                evaluate(earlier)
    evaluate(block)


def evaluate(block: Example) -> None:
    EVALUATED.append(block)
    try:
        block.evaluate()
    except ModuleNotFoundError as error:
        WITHOUT_FRAMEWORK.add(block.path)
        skip_without(error)
        raise
    except NameError:
        if block.path not in WITHOUT_FRAMEWORK:
            raise
        pytest.skip("goes on from a block that needs a framework that is not installed")


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    runner, missing = doctest.DebugRunner(optionflags=OPTIONS), list[ModuleNotFoundError]()
    for docstring in doctest.DocTestFinder().find(load(name)):
        try:
            runner.run(docstring)
        except doctest.UnexpectedException as error:
            if not isinstance(error.exc_info[1], ModuleNotFoundError):
                raise
            missing.append(error.exc_info[1])
    for error_of_import in missing:
        skip_without(error_of_import)
        raise error_of_import


@pytest.mark.parametrize("name", [name for name in xent.__all__ if inspect.isfunction(getattr(xent, name))])
def test_public_function_has_an_example(name: str) -> None:
    assert doctest.DocTestParser().get_examples(inspect.getdoc(getattr(xent, name)) or "")


def test_readme_has_runnable_blocks() -> None:
    assert any(place.startswith("README.md:") for place in BLOCKS)


def test_readme_has_the_command_that_ci_runs() -> None:
    command = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1]
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [*DOCUMENTS, *MODULES.values()], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_do_not_recommend_the_other_xent(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(pip3? install|uv add)\b[^\n`;&|]*(?<![\w/.-])xent(?![\w/.-])", text)
