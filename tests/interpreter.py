"""Patches for Triton's interpreter: make it round like a GPU, and make it faster.

It rounds float32 to bfloat16 toward zero, while GPUs round to nearest. It computes with NumPy, which warns of
infinities and NaN. It replaces the functions of Triton's language at every call of a function in a kernel, although
those of the launch are still in place; this takes half of a test's time. A fifth of the rest is spent on deriving the
properties of a type for each value.
"""

import warnings
from functools import cache
from typing import Any

import numpy as np

from tests.interpreter_types import prepare_types

__all__ = ["prepare"]


def prepare() -> None:
    """Make the interpreter round like a GPU, and patch the language once per launch."""
    from triton.runtime import interpreter

    interpreter._convert_float = _round_to_nearest(interpreter._convert_float)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    prepare_types()
    patched = set()
    interpreter._patch_lang = _patch_once(interpreter._patch_lang, patched)
    run = interpreter.GridExecutor.__call__

    def launch(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)  # Triton 3.4, NumPy 1.26
            return run(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch


def _round_to_nearest(convert: Any) -> Any:
    import triton.language as tl

    def rounded(values: Any, source: Any, wanted: Any, mode: Any) -> Any:
        if (source, wanted) != (tl.float32, tl.bfloat16):
            return convert(values, source, wanted, mode)
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)

    return rounded


def _remembered(numpy_dtype: Any) -> Any:
    """Return the function with a cache; pointers and blocks are not hashable."""
    of_number = cache(numpy_dtype)

    def remembered(kind: Any) -> Any:
        number = kind.scalar
        return numpy_dtype(kind) if number.is_ptr() else of_number(number)

    return remembered


def _patch_once(patch: Any, patched: set[int]) -> Any:
    """Return `patch` without the modules in `patched`, which this launch has patched already."""
    import triton.language as tl

    languages = (tl, tl.core)
    seen_by = {}

    def once(function: Any) -> Any:
        if function not in seen_by:
            visible = list(function.__globals__.values())
            seen_by[function] = {id(module) for module in languages if any(value is module for value in visible)}
        if seen_by[function] <= patched:
            return None
        patched.update(seen_by[function])
        return patch(function)

    return once
