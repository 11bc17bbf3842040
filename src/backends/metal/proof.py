"""A file that records that `python -m xent check metal --full` has passed here, for PyTorch tensors.

The kernels were written without an Apple GPU. So "auto" uses them for PyTorch tensors only after the check has passed.
"""

import hashlib
import platform
import sys
import warnings
from os import environ
from pathlib import Path

__all__ = ["PROVEN", "file", "fingerprint", "remember"]

_PACKAGE = Path(__file__).parents[2]


def file() -> Path:
    """Return the path of the file. It has one line for each combination of versions that has passed."""
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "xent" / "metal-passed.txt"


def fingerprint() -> str:
    """Return the versions for which a passed check is valid: a hash of this package's sources, PyTorch, the system."""
    import torch

    sources = sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".metal"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    return f"sources {digest}, torch {torch.__version__}, {platform.platform()}"


def remember() -> None:
    """Record that the check has passed; warn if the file cannot be written."""
    global PROVEN
    PROVEN = True
    try:
        file().parent.mkdir(parents=True, exist_ok=True)
        with file().open("a", encoding="utf-8") as lines:
            lines.write(f"{fingerprint()}\n")
    except OSError as error:
        warnings.warn(
            f"the check has passed, but this cannot be remembered for later processes: {error}. There, pass "
            "backend='metal', or set XENT_BACKEND=metal",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_proven() -> bool:
    try:
        return fingerprint() in file().read_text(encoding="utf-8").splitlines()
    except OSError:
        return False


PROVEN = _is_proven()
