"""What is launched, noted on its way to the device."""

import inspect
import sys
from typing import Any

import pytest

__all__ = ["Launches", "note_launches"]

Launches = list[tuple[str, int, dict[str, Any]]]
"""Of each launch the kernel's name, how many programs, and its arguments and constants by name."""


def note_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Return a list that grows with each launch, whichever module makes it."""
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
