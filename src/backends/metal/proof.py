"""Whether `python -m xent check metal` has passed on this machine's tensors with these sources, which a file remembers.

Nobody who wrote the kernels had an Apple GPU. So "auto" takes them for PyTorch tensors only where the check has passed.
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
    """Return where it is written down: a line for each machine and version that has passed."""
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "xent" / "metal-passed.txt"


def fingerprint() -> str:
    """Return what a check is good for: the sources of this package, PyTorch, the system."""
    import torch

    sources = sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".metal"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    return f"sources {digest}, torch {torch.__version__}, {platform.platform()}"


def remember() -> None:
    """Write down that the check has passed; a warning where that is not possible."""
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
