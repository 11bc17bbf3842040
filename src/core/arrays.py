"""Framework, dtype and device of arrays, and the check that the arrays of a call agree. Imports no framework."""

import reprlib
from typing import Any

import numpy as np

__all__ = [
    "FLOAT_DTYPES",
    "INTEGER_DTYPES",
    "PLAIN",
    "describe",
    "dtype_name",
    "framework_of",
    "is_tracing",
    "number_of",
    "one_framework",
    "shape_of",
    "shown",
    "wide",
]

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")
INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32")
PLAIN = (int, float, type(None))
"""Types of numbers that are neither arrays nor NumPy's."""
_NUMBERS = ("normalizer", "label_smoothing", "z_loss", "softcap", "logit_scale")
_HINTS = {
    "mlx.nn": ": pass linear_weight, linear_bias = xent.integrations.mlx.classifier(module)",
    "torch.nn.modules": ": pass module.weight, and linear_bias=module.bias",
}
_REQUIRED = (
    "logits",
    "input",
    "linear_weight",
    "target",
    "teacher.input",
    "teacher.weight",
    "teacher.ids",
    "teacher.log_probs",
)


def framework_of(value: Any) -> str | None:
    """Return "torch", "mlx" or "numpy", or None if `value` is no array of these frameworks.

    The framework is not looked up in sys.modules: torch.compile would then recompile whenever a module is imported.
    """
    if value is None or isinstance(value, (int, float)):
        return None
    if isinstance(value, np.ndarray):
        return "numpy"
    if hasattr(value, "requires_grad"):
        try:
            import torch
        except ImportError:
            return None
        return "torch" if isinstance(value, torch.Tensor) else None
    if any((base.__module__, base.__name__) == ("mlx.core", "array") for base in type(value).__mro__):
        return "mlx"
    return None


def dtype_name(array: Any) -> str:
    """Return the name of the dtype without its framework: "float32", "bfloat16", "int64"."""
    return str(array.dtype).rpartition(".")[2]


def describe(value: Any) -> str:
    """Describe a value for an error message: shape, dtype and framework of an array, or the type of anything else."""
    framework = framework_of(value)
    if framework is None:
        return "None" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"
    return f"{framework} array of shape {tuple(value.shape)}, dtype {dtype_name(value)}"


def shown(value: Any) -> str:
    """Return a value as it is written in Python, abbreviated if it is long; an array is described."""
    return reprlib.repr(value) if framework_of(value) is None else describe(value)


def shape_of(*sizes: Any) -> str:
    """Return a shape whose sizes may have names: "(6, D)"."""
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def is_tracing(framework: str | None) -> bool:
    """Whether a compiler is tracing this call. The values of numbers are then symbolic and must not be read."""
    if framework != "torch":
        return False
    import torch

    return torch.compiler.is_compiling()


def number_of(framework: str | None, value: Any) -> Any:
    """Convert a NumPy number or a 0-d NumPy array to a Python number; return anything else unchanged.

    Dynamo treats both as arrays of unknown value; while it traces, they become 0-d tensors.
    """
    if not isinstance(value, (np.generic, np.ndarray)) or value.ndim:
        return value
    if not is_tracing(framework):
        return value.item() if value.dtype.kind in "fiu" else value
    import torch

    return torch.as_tensor(value)


def wide(value: Any) -> Any:
    """Convert a 0-d array to float64, on mps and for MLX to float32 if it is not float64; return numbers unchanged."""
    framework = framework_of(value)
    if framework == "torch":
        import torch

        return value.to(torch.float32 if value.device.type == "mps" else torch.float64)
    if framework == "mlx":
        import mlx.core as mx

        return value if value.dtype == mx.float64 else value.astype(mx.float32)
    return value


def one_framework(arrays: dict[str, Any]) -> str:
    """Return the framework that all arrays share; those that are None are left out."""
    met: dict[str, Any] = {}
    first, framework, kind = "", None, type(None)
    for name, array in arrays.items():
        if array is None and name not in _REQUIRED:
            continue
        owner = framework if type(array) is kind else framework_of(array)
        if owner is None:
            raise TypeError(
                f"{name} must be a torch, MLX or NumPy array, got {describe(array)}{_of_module(name, array)}"
            )
        if framework is None:
            first, framework, kind = name, owner, type(array)
        elif owner != framework:
            raise TypeError(
                f"all arrays of a call must be of one framework: {first} is a {framework} array and {name} a {owner} "
                "array; convert one of them"
            )
        met[name] = array
    assert framework is not None  # the first array is required
    if framework == "torch":
        _check_tensors(met)
    for name, array in met.items() if framework == "numpy" else ():
        if hasattr(array, "mask"):
            raise TypeError(
                f"{name} must be a plain array, got a {type(array).__name__}, whose mask would be ignored: pass its "
                "data, and set ignore_index in target, or sample_weight=0, where an entry does not count"
            )
    return framework


def _of_module(name: str, value: Any) -> str:
    """Return the hint how to pass a module's arrays, or "" if `value` is not a module."""
    modules = [base.__module__ for base in type(value).__mro__ if name == "linear_weight"]
    hints = (hint for start, hint in _HINTS.items() if any(module.startswith(start) for module in modules))
    return next(hints, "")


def _check_tensors(tensors: dict[str, Any]) -> None:
    """Raise ValueError for tensors on several devices, TypeError for a sparse, nested or sharded one."""
    first, device = next((name, tensor.device) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if tensor.device != device and not (name in _NUMBERS and tensor.device.type == "cpu"):
            raise ValueError(
                f"all tensors of a call must be on one device: {first} is on {device}, {name} on {tensor.device}; move "
                f"it with {name}.to({first}.device)"
            )
        if tensor.is_nested:
            raise TypeError(f"{name} must be a dense tensor, got a nested one: pad it, or pass its values()")
        if str(tensor.layout) != "torch.strided":
            raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}: pass {name}.to_dense()")
        if hasattr(tensor, "full_tensor"):
            raise TypeError(
                f"{name} must be a plain tensor, got a {type(tensor).__name__}: pass {name}.to_local() or "
                f"{name}.full_tensor()"
            )
