"""Which framework owns an array, and facts about the array, without importing a framework."""

import reprlib
from typing import Any

import numpy as np

__all__ = ["FLOAT_DTYPES", "INTEGER_DTYPES", "describe", "dtype_name", "framework_of", "is_tracing"]

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")
INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32")


def framework_of(value: Any) -> str | None:
    """Return "torch", "mlx" or "numpy", or None where `value` is no array of theirs.

    A framework that owns an array is imported already, but is not looked for in sys.modules: that would tie every graph
    that torch.compile makes to the modules that are imported by then.
    """
    if isinstance(value, np.ndarray):
        return "numpy"
    if value is None or isinstance(value, (bool, int, float)):
        return None
    if hasattr(value, "requires_grad"):
        import torch

        return "torch" if isinstance(value, torch.Tensor) else None
    if any((base.__module__, base.__name__) == ("mlx.core", "array") for base in type(value).__mro__):
        return "mlx"
    return None


def dtype_name(array: Any) -> str:
    """Return the dtype's plain name: "float32", "bfloat16", "int64"."""
    return str(array.dtype).rpartition(".")[2]


def describe(value: Any) -> str:
    """Say what came, for error messages: shape, dtype and framework of an array, the type of anything else."""
    framework = framework_of(value)
    if framework is None:
        return "None" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"
    return f"{framework} array of shape {tuple(value.shape)}, dtype {dtype_name(value)}"


def is_tracing(framework: str | None) -> bool:
    """Whether a compiler is tracing this call, so that the values of numbers are symbols that must not be looked at."""
    if framework != "torch":
        return False
    import torch

    return torch.compiler.is_compiling()
