"""Buffers with nothing on either side: each lies in pages of its own between pages that may not be touched."""

import ctypes
import mmap
import sys
from typing import Any

import numpy as np

__all__ = ["Buffer"]

_PAGE = mmap.PAGESIZE
_GUARD = 2**30  # addresses, no memory
_MAP_NORESERVE = 0 if sys.platform == "darwin" else 0x4000
_POISON = 0xFF  # NaN in every float dtype, -1 in integers
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Buffer:
    """`size` bytes that begin at a page's first byte, or end at a page's last.

    In the one place a read before the buffer faults, in the other a read behind it, and there it is aligned to no more
    than its elements, as a slice of an array may be. What is left of the pages holds poison, which must stay. Pages
    without poison are zero, and take no memory before they are written to.
    """

    def __init__(self, name: str, size: int, at_end: bool = False, poisoned: bool = True) -> None:
        self.name, self.size = name, size
        self._pages = -(-max(size, 1) // _PAGE) * _PAGE
        how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._start = _libc.mmap(None, self._pages + 2 * _GUARD, 0, how, -1, 0)
        if self._start == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self._inner = self._start + _GUARD
        if poisoned:
            ctypes.memset(self._inner, _POISON, self._pages)
        self._before = self._pages - size if at_end else 0
        self.address = self._inner + self._before

    def fill(self, values: Any, start: int = 0, read_only: bool = False) -> None:
        """Take a NumPy array's bytes, from byte `start` on."""
        values = np.ascontiguousarray(values)
        assert start + values.nbytes <= self.size
        ctypes.memmove(self.address + start, values.ctypes.data, values.nbytes)
        if read_only:
            self._protect(mmap.PROT_READ)

    def array(self, dtype: Any, shape: tuple[int, ...], start: int = 0) -> Any:
        """Return a copy of what lies from byte `start` on as a NumPy array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(ctypes.string_at(self.address + start, size), dtype).reshape(shape).copy()

    def overwritten(self) -> str | None:
        """Say whether bytes around the buffer were written to."""
        whole = np.frombuffer(ctypes.string_at(self._inner, self._pages), np.uint8)
        around = np.concatenate([whole[: self._before], whole[self._before + self.size :]])
        return None if (around == _POISON).all() else f"the bytes around {self.name} were written to"

    def explain(self, address: int) -> str | None:
        """Say where an address lies that was touched without leave, if it is near this buffer."""
        if not self._start <= address < self._start + self._pages + 2 * _GUARD:
            return None
        offset = address - self.address
        if 0 <= offset < self.size:
            return f"byte {offset} of {self.name} was written to, which is an input"
        return f"byte {offset} of {self.name} was touched, which has {self.size} bytes"

    def close(self) -> None:
        """Give the pages back."""
        _libc.munmap(self._start, self._pages + 2 * _GUARD)

    def _protect(self, how: int) -> None:
        if _libc.mprotect(self._start + _GUARD, self._pages, how):
            raise OSError(ctypes.get_errno(), "mprotect")
