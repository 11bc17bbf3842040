"""`HostNumber`: an integer that a device computes and the host reads later, also in recorded calls."""

import torch
from torch import Tensor

from xent.backends.torch import recorder

__all__ = ["HostNumber"]


class HostNumber:
    """A 0-d int64 tensor on a CUDA device, on its way to the host."""

    def __init__(self, number: Tensor) -> None:
        """Start the copy, without waiting for it."""
        self._slot: int | None = None
        if recorder.is_recording():
            with recorder.paused():
                self._start(number)
            self._slot = recorder.note_object(HostNumber, number)
        else:
            self._start(number)

    def _start(self, number: Tensor) -> None:
        self._on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
        self._on_host.copy_(number, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> int:
        """Wait for the number and return it."""
        self._event.synchronize()
        if self._slot is None:
            return int(self._on_host)
        with recorder.paused():
            return int(self._on_host)

    def read_usual(self, usual: int) -> int:
        """Wait for the number and return it. A recording of the call is repeated only if the number is `usual`."""
        found = self.read()
        if self._slot is not None:
            recorder.note_check(self._slot, lambda number: number.read() == usual, found == usual)
        return found
