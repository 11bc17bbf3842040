"""Whether the kernels of a backend are proved on this machine: `python -m xent check NAME --full` has passed here.

Some kernels were written without the hardware that they are for. "auto" uses them there only after the check, which a
file records.
"""

import hashlib
import os
import platform
import sys
import warnings
from functools import cached_property
from pathlib import Path
from typing import ClassVar

__all__ = ["Proof"]

_PACKAGE = Path(__file__).parents[1]


class Proof:
    """The proof of one backend's kernels."""

    remembered: ClassVar[int] = 0
    """How often a check has passed in this process. Calls that "auto" planned before select a backend again."""

    def __init__(self, name: str, versions: str) -> None:
        """`versions`: the hardware and the packages for which it is valid."""
        self._name, self._versions = name, versions

    @cached_property
    def passed(self) -> bool:
        """Whether the check has passed, in this process or before it."""
        try:
            return self.fingerprint() in self.file().read_text(encoding="utf-8").splitlines()
        except OSError:
            return False

    def file(self) -> Path:
        """Return the path of the file. It has one line for each combination of versions that has passed."""
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        if sys.platform == "darwin":
            caches = Path.home() / "Library" / "Caches"
        return caches / "xent" / f"{self._name}-passed.txt"

    def fingerprint(self) -> str:
        """Return what the proof is valid for: a hash of this package's sources, the versions, and the system."""
        sources = sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".metal"))
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
        return f"sources {digest}, {self._versions}, {platform.platform()}"

    def remember(self) -> None:
        """Record that the check has passed; warn if the file cannot be written."""
        self.passed = True
        Proof.remembered += 1
        try:
            self.file().parent.mkdir(parents=True, exist_ok=True)
            with self.file().open("a", encoding="utf-8") as lines:
                lines.write(f"{self.fingerprint()}\n")
        except OSError as error:
            warnings.warn(
                f"the check has passed, but this cannot be remembered for later processes: {error}. There, pass "
                f"backend={self._name!r}, or set XENT_BACKEND={self._name}",
                RuntimeWarning,
                stacklevel=2,
            )
