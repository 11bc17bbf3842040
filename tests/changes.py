"""The files that differ from the branch main: what they touch is tested by bare `nox` and by `nox -s quick`."""

import subprocess
from pathlib import Path

__all__ = ["ROOT", "changed_files"]

ROOT = Path(__file__).parents[1]


def changed_files() -> list[str] | None:
    """Return the files that were added, changed or removed since main, committed or not, or None if git cannot tell."""
    base = _git("merge-base", "HEAD", "origin/main") or _git("merge-base", "HEAD", "main")
    if not base:
        return None
    listings = _git("diff", "--name-only", *base), _git("ls-files", "--others", "--exclude-standard")
    return sorted({name for listing in listings for name in listing or ()})


def _git(*arguments: str) -> list[str] | None:
    """Return the lines that git prints, or None if it fails or is not there."""
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.splitlines()
