"""Buffers with guard pages on both sides, so that accesses out of bounds fault."""

import ctypes
import mmap
import sys
from typing import Any

import numpy as np

__all__ = ["Buffer"]

_PAGE = mmap.PAGESIZE
_GUARD = 2**30  # bytes of address space, without memory
_MAP_NORESERVE = 0 if sys.platform == "darwin" else 0x4000
_POISON = 0xFF  # NaN in every float dtype, -1 in integers
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Buffer:
    """`size` bytes that start at the first byte of a page, or end at the last byte of a page.

    In the first case an access before the buffer faults, in the second an access after it. In the second case the
    buffer is aligned only to its elements, like a slice of an array. The rest of the pages contains poison, which must
    not change. Pages without poison are zero, and take no memory before they are written to.
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
        """Copy the bytes of a NumPy array to byte `start` and following."""
        values = np.ascontiguousarray(values)
        assert start + values.nbytes <= self.size
        ctypes.memmove(self.address + start, values.ctypes.data, values.nbytes)
        if read_only:
            self._protect(mmap.PROT_READ)

    def array(self, dtype: Any, shape: tuple[int, ...], start: int = 0) -> Any:
        """Return a copy of the bytes from `start` on as a NumPy array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(ctypes.string_at(self.address + start, size), dtype).reshape(shape).copy()

    def overwritten(self) -> str | None:
        """Return whether bytes around the buffer were written to."""
        whole = np.frombuffer(ctypes.string_at(self._inner, self._pages), np.uint8)
        around = np.concatenate([whole[: self._before], whole[self._before + self.size :]])
        return None if (around == _POISON).all() else f"the bytes around {self.name} were written to"

    def explain(self, address: int) -> str | None:
        """Describe the position of an invalid address relative to this buffer, if it is near."""
        if not self._start <= address < self._start + self._pages + 2 * _GUARD:
            return None
        offset = address - self.address
        if 0 <= offset < self.size:
            return f"byte {offset} of {self.name} was written to, which is an input"
        return f"byte {offset} of {self.name} was touched, which has {self.size} bytes"

    def close(self) -> None:
        """Release the pages."""
        _libc.munmap(self._start, self._pages + 2 * _GUARD)

    def _protect(self, how: int) -> None:
        if _libc.mprotect(self._start + _GUARD, self._pages, how):
            raise OSError(ctypes.get_errno(), "mprotect")
