"""Record the launches of kernels."""

import inspect
import sys
from typing import Any

import pytest

__all__ = ["Launches", "note_launches"]

Launches = list[tuple[str, int, dict[str, Any]]]
"""(kernel's name, number of programs, arguments and constants by name) of each launch."""


def note_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Return a list to which each launch is appended, whichever module makes it."""
    from xent.backends.triton.launch import launch

    noted: Launches = []

    def note(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], **more: int) -> None:
        names = list(inspect.signature(kernel.fn).parameters)[: len(arguments)]
        noted.append((kernel.fn.__name__, programs, dict(zip(names, arguments, strict=True)) | constants))
        launch(kernel, programs, arguments, constants, **more)

    for name, module in list(sys.modules.items()):
        if name.startswith("xent.backends.triton.") and vars(module).get("launch") is launch:
            monkeypatch.setattr(module, "launch", note)
    return noted
