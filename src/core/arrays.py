"""Which framework owns an array, and facts about the array, without importing a framework.

An array of a framework can only exist when that framework is already imported, so looking into `sys.modules` is enough.
"""

import sys
from typing import Any

__all__ = ["FLOAT_DTYPES", "INTEGER_DTYPES", "describe", "dtype_name", "framework_of", "is_tracing"]

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")
INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32")

_ARRAY_TYPES = (("torch", "torch", "Tensor"), ("mlx", "mlx.core", "array"), ("numpy", "numpy", "ndarray"))


def framework_of(value: Any) -> str | None:
    """Return "torch", "mlx" or "numpy", or None where `value` is no array of theirs."""
    for framework, module_name, type_name in _ARRAY_TYPES:
        module = sys.modules.get(module_name)
        if module is not None and isinstance(value, getattr(module, type_name)):
            return framework
    return None


def dtype_name(array: Any) -> str:
    """Return the dtype's plain name: "float32", "bfloat16", "int64"."""
    return str(array.dtype).rpartition(".")[2]


def describe(value: Any) -> str:
    """Say what came, for error messages: shape, dtype and framework of an array, the type of anything else."""
    framework = framework_of(value)
    if framework is None:
        return f"{type(value).__name__} {value!r}"
    return f"{framework} array of shape {tuple(value.shape)}, dtype {dtype_name(value)}"


def is_tracing(framework: str | None) -> bool:
    """Whether a compiler is tracing this call, so that the values of numbers are symbols that must not be looked at."""
    return framework == "torch" and sys.modules["torch"].compiler.is_compiling()
