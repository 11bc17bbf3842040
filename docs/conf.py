"""Sphinx configuration: files of the repository become pages."""

import re
from pathlib import Path

from sphinx.application import Sphinx

import xent

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
    "benchmarks/NOTES.md": "experiments",
}

project = "xent"
author = "The xent authors"
release = version = xent.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
default_role = "code"
smartquotes = False
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(mlx|numpy|torch|typing)\..*")]

autodoc_mock_imports = ["axolotl", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False

html_theme = "furo"
html_title = "xent"
html_static_path = ["_static"]
html_css_files = ["page.css"]


def take_page_from_root(app: Sphinx, docname: str, source: list[str]) -> None:
    """Show the file that a page stands for, with its links adapted.

    The index keeps its own text. That of the other pages is for readers of the
    repository.
    """

    def turn(link: re.Match[str]) -> str:
        path, anchor = link["path"], link["anchor"] or ""
        if path in PAGES:
            return f"]({PAGES[path]}.md{anchor})"
        if path.startswith("docs/"):
            return f"]({path.removeprefix('docs/')}{anchor})"
        return f"](../{path}{anchor})"

    for path, page in PAGES.items():
        if page == docname:
            text, own = (
                (ROOT / path).read_text(encoding="utf-8"),
                source[0] if page == "index" else "",
            )
            source[0] = (
                re.sub(
                    r"\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)",
                    turn,
                    text,
                )
                + own
            )


def setup(app: Sphinx) -> None:
    """Register with Sphinx."""
    app.connect("source-read", take_page_from_root)
