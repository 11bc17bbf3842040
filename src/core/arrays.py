"""Which framework owns an array, and facts about the array, without importing a framework."""

from typing import Any

__all__ = ["FLOAT_DTYPES", "INTEGER_DTYPES", "describe", "dtype_name", "framework_of", "is_tracing"]

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")
INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32")

# A class is known by where it says it is from: looking it up in sys.modules would make a graph that torch.compile made
# invalid at every later import.
_ARRAY_TYPES = {("torch", "Tensor"): "torch", ("mlx.core", "array"): "mlx", ("numpy", "ndarray"): "numpy"}


def framework_of(value: Any) -> str | None:
    """Return "torch", "mlx" or "numpy", or None where `value` is no array of theirs."""
    for base in type(value).__mro__:
        framework = _ARRAY_TYPES.get((base.__module__, base.__name__))
        if framework is not None:
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
    if framework != "torch":
        return False
    import torch

    return torch.compiler.is_compiling()
