"""docs/errors.md quotes messages that are in the source."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.packaging.tree import MODULES, ROOT

_PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
_FIRST_CELLS = re.findall(r"^\| (`.*?) \| ", _PAGE.split("\n## ", 1)[1], re.MULTILINE)
QUOTES = [quote for cell in _FIRST_CELLS for quote in re.findall(r"`([^`]+)`", cell)]
_VALUE = re.compile(r"\.\.\.|\b[A-Z]+\b(?:-1)?|-?\d+")
"""Placeholders of values: three dots, a name in capitals, a number."""


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace("{}", "\0")


TEXTS = "\n".join(
    " ".join(_VALUE.sub("\0", text).split())
    for path in MODULES.values()
    for text in _texts(ast.parse(path.read_text(encoding="utf-8")))
)


@pytest.mark.parametrize("quote", QUOTES)
def test_quoted_message_is_in_the_source(quote: str) -> None:
    parts = [part.strip(" :;,.()'=[]") for part in _VALUE.split(quote)]
    words = [part for part in parts if len(part) >= 4]
    assert words
    for part in words:
        assert part in TEXTS
