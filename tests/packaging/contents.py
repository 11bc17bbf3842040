"""Check the contents of distributions: `python -m tests.packaging.contents dist/*`."""

import sys
import tarfile
import zipfile
from pathlib import Path

__all__ = ["main", "missing"]

_ROOT = Path(__file__).parents[2]
_UNWANTED = ("__pycache__", ".nox", ".venv", "typings", "site")


def main(paths: list[str]) -> int:
    """Print missing and unwanted files; return the exit status."""
    problems = [f"{path}: {problem}" for path in paths for problem in missing(Path(path))]
    print("\n".join(problems) or f"{len(paths)} distributions hold every file of the package")
    return 1 if problems or len(paths) != 2 else 0


def missing(path: Path) -> list[str]:
    """Return the missing and the unwanted files of a wheel or a source distribution."""
    if path.suffix == ".whl":
        names, prefix = set(zipfile.ZipFile(path).namelist()), "xent/"
    else:
        with tarfile.open(path) as archive:
            names, prefix = {name.partition("/")[2] for name in archive.getnames()}, "src/"
    source = _ROOT / "src"
    wanted = {
        prefix + file.relative_to(source).as_posix()
        for file in source.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    found = [f"lacks {name}" for name in sorted(wanted - names)]
    return found + [f"holds {name}" for name in sorted(names) if any(part in _UNWANTED for part in name.split("/"))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
