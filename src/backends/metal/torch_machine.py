"""Whether PyTorch can use Metal on this machine, and whether `python -m xent check metal --full` has passed here.

Both are found once, at the first call that could use it. The kernels were written without an Apple GPU. So "auto" uses
them for PyTorch tensors only after the check has passed, which a file records.
"""

import hashlib
import os
import platform
import warnings
from pathlib import Path

__all__ = ["DEVICES", "MISSING", "PROVEN", "VERSIONS", "file", "find", "fingerprint", "remember"]

_PACKAGE = Path(__file__).parents[2]


def find() -> tuple[str | None, dict[str, str], tuple[str, ...]]:
    """Return (why Metal cannot be used or None, versions, device types)."""
    versions: dict[str, str] = {}
    try:
        import torch
    except ImportError as error:
        return f"PyTorch cannot be imported: {error}", versions, ()
    versions["torch"] = str(torch.__version__)
    if not torch.backends.mps.is_available():
        here = f"{platform.system()} on {platform.machine()}"
        return (
            f"its kernels are for Apple GPUs, and PyTorch finds none here ({here}); use backend 'torch'",
            versions,
            (),
        )
    if not hasattr(torch.mps, "compile_shader"):
        return f"it needs PyTorch 2.7 or later and found {torch.__version__}; use backend 'torch'", versions, ()
    if os.environ.get("PYTORCH_MPS_FAST_MATH", "0") != "0":
        return "PYTORCH_MPS_FAST_MATH=1 compiles kernels as if there were no infinities: unset it", versions, ()
    return None, versions, ("mps",)


def file() -> Path:
    """Return the path of the file. It has one line for each combination of versions that has passed."""
    return Path.home() / "Library" / "Caches" / "xent" / "metal-passed.txt"


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


MISSING, VERSIONS, DEVICES = find()
PROVEN = MISSING is None and _is_proven()
