"""The version is the same in all files, and missing files of a distribution are noticed."""

import re
import zipfile
from pathlib import Path

import pytest

import xent
from tests.packaging.contents import missing

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "pattern"),
    [("CITATION.cff", r"^version: (\S+)$"), ("CHANGELOG.md", r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$")],
)
def test_version_is_the_same_everywhere(file: str, pattern: str) -> None:
    found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    assert found[1] == xent.__version__


def test_missing_and_unwanted_files_are_noticed(tmp_path: Path) -> None:
    wheel = tmp_path / "xent_loss-0-py3-none-any.whl"
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".metal", ".typed")]
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sources:
            archive.write(path, f"xent/{path.relative_to(ROOT / 'src').as_posix()}")
    assert missing(wheel) == []
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sources[1:]:
            archive.write(path, f"xent/{path.relative_to(ROOT / 'src').as_posix()}")
        archive.writestr("xent/__pycache__/api.pyc", "")
    lacking = f"xent/{sources[0].relative_to(ROOT / 'src').as_posix()}"
    assert missing(wheel) == [f"lacks {lacking}", "holds xent/__pycache__/api.pyc"]
