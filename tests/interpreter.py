"""Where Triton's interpreter differs from a GPU.

It rounds float32 to bfloat16 toward zero, where GPUs round to nearest; and NumPy, which it computes with, warns of
infinities and NaN that a GPU passes on as they are.
"""

import warnings
from typing import Any

import numpy as np

__all__ = ["round_to_nearest"]


def round_to_nearest() -> None:
    """Make the interpreter round as GPUs do."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, wanted: Any, mode: Any) -> Any:
        if (source, wanted) != (tl.float32, tl.bfloat16):
            return convert(values, source, wanted, mode)
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)

    interpreter._convert_float = rounded

    run = interpreter.GridExecutor.__call__

    def quiet(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return run(*args, **kwargs)

    interpreter.GridExecutor.__call__ = quiet
