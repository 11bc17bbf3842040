"""Check the arrays of a call: one framework and device, dtypes, shapes. Errors name the array and what is allowed."""

from xent.core.call import FLOAT_DTYPES, describe, dtype_name, framework_of
from xent.core.spec import Array, LinearTeacher, QuantizedRows, QuantizedWeight, Subset, Support, TopKTeacher
from xent.core.validate import check_int

__all__ = ["ARRAYS", "arrays_of", "check_classifier", "check_dtype", "check_shape", "common_framework", "shape_of"]

ARRAYS = (
    "logits",
    "input",
    "linear_weight",
    "target",
    "teacher",
    "linear_bias",
    "weight",
    "sample_weight",
    "support",
)
_PARTS: dict[type, tuple[str, ...]] = {
    QuantizedWeight: ("packed", "scales", "biases"),
    QuantizedRows: ("packed",),
    LinearTeacher: ("input", "weight", "bias"),
    TopKTeacher: ("ids", "log_probs"),
    Support: ("ids", "offsets"),
    Subset: ("teacher", "ids"),
}
"""The arrays of arguments that hold several."""
_NUMBERS = ("normalizer", "label_smoothing", "z_loss", "softcap", "logit_scale")
"""The options that may be 0-d tensors, also on the CPU."""
_HINTS = {
    "mlx.nn": ": pass linear_weight, linear_bias = xent.integrations.mlx.classifier(module)",
    "torch.nn.modules": ": if it is quantized, pass what xent.integrations.torch.classifier(module) returns; "
    "otherwise: pass module.weight, and linear_bias=module.bias",
}
_OF_TORCHAO = ("tensor_data_names", "tensor_impl")
"""Attributes of quantized tensors of torchao."""
_OPTIONAL = (
    "linear_weight.biases",
    "linear_bias",
    "weight",
    "sample_weight",
    "support",
    "teacher.weight.biases",
    "teacher.bias",
)


def arrays_of(name: str, value: object) -> dict[str, Array]:
    """Return the arrays of an argument, which may hold several, by the names that error messages use."""
    for kind, fields in _PARTS.items():
        if isinstance(value, kind):
            arrays: dict[str, Array] = {}
            for field in fields:
                arrays |= arrays_of(name if field == "teacher" else f"{name}.{field}", getattr(value, field))
            return arrays
    return {name: value}


def common_framework(arrays: dict[str, Array]) -> str:
    """Return the framework that all arrays share; optional ones that are None do not count.

    Raise TypeError for an array of another framework, and for a sparse, nested, sharded or masked one, ValueError for
    a tensor on another device.
    """
    first, framework, kind, device = "", None, None, None
    for name, array in arrays.items():
        if name in _OPTIONAL and array is None:
            continue
        if type(array) is not kind:
            owner, kind = framework_of(array), type(array)
            if owner is None:
                modules = [base.__module__ for base in kind.__mro__ if name == "linear_weight"]
                hints = (hint for start, hint in _HINTS.items() if any(module.startswith(start) for module in modules))
                raise TypeError(f"{name} must be a torch, MLX or NumPy array, got {describe(array)}{next(hints, '')}")
            if framework is None:
                first, framework, device = name, owner, getattr(array, "device", None)
            elif owner != framework:
                raise TypeError(
                    f"all arrays of a call must be of one framework: {first} is a {framework} array and {name} a "
                    f"{owner} array; convert one of them"
                )
        if framework == "torch":
            if array.device != device and not (name in _NUMBERS and array.device.type == "cpu"):
                raise ValueError(
                    f"all tensors of a call must be on one device: {first} is on {device}, {name} on {array.device}; "
                    f"move it with {name}.to({first}.device)"
                )
            if array.is_nested:
                raise TypeError(f"{name} must be a dense tensor, got a nested one: pad it, or pass its values()")
            if str(array.layout) != "torch.strided":
                raise TypeError(f"{name} must be a dense tensor, got layout {array.layout}: pass {name}.to_dense()")
            if hasattr(array, "full_tensor") or any(hasattr(array, part) for part in _OF_TORCHAO):
                raise TypeError(
                    f"{name} must be a plain tensor, got a {type(array).__name__}: pass {name}.to_local() or "
                    f"{name}.full_tensor(), of a quantized head what xent.integrations.torch.classifier(module) returns"
                )
        elif framework == "numpy" and hasattr(array, "mask"):
            raise TypeError(
                f"{name} must be a plain array, got a {type(array).__name__}, whose mask would be ignored: pass its "
                "data, and set ignore_index in target, or sample_weight=0, where an entry does not count"
            )
    assert framework is not None  # the first array is required
    return framework


def shape_of(*sizes: int | str) -> str:
    """Return a shape whose sizes may have names: "(6, D)"."""
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def check_classifier(of_input: str, input: Array, of_weight: str, weight: Array, bias: Array) -> None:
    """Check hidden states and a classifier. `of_input` and `of_weight` are their names in error messages."""
    of_bias = of_weight.replace("weight", "bias")
    for name, array in ((of_input, input), (of_weight, weight), (of_bias, bias)):
        if isinstance(array, QuantizedWeight):
            _check_quantized(array, name)
        elif isinstance(array, QuantizedRows):
            if array.packed.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient, which a quantized classifier does not get: freeze it with "
                    "requires_grad_(False), or pass one in a floating dtype"
                )
        elif array is not None:
            check_dtype(name, array)
    if len(input.shape) < 1:
        raise ValueError(f"{of_input} must have shape (..., D), got a 0-d array")
    if len(weight.shape) != 2 or weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"{of_weight} must have shape (V, D) with D = {input.shape[-1]}, the last axis of {of_input} "
            f"{tuple(input.shape)}; got {tuple(weight.shape)}"
        )
    if bias is not None:
        check_shape(bias, (weight.shape[0],), f"{of_bias} must have shape {{}}, the rows of {of_weight}; got {{}}")


def _check_quantized(weight: QuantizedWeight, name: str) -> None:
    """Raise TypeError or ValueError for an invalid quantized classifier."""
    if framework_of(weight.packed) != "mlx":
        raise TypeError(f"{name}: a QuantizedWeight holds MLX arrays, got {describe(weight.packed)}")
    if dtype_name(weight.packed) != "uint32" or len(weight.packed.shape) != 2:
        raise TypeError(
            f"{name}.packed must be a uint32 array (V, D * bits / 32), as mlx.core.quantize returns it; got "
            f"{describe(weight.packed)}"
        )
    for number in ("group_size", "bits"):
        check_int(f"{name}.{number}", getattr(weight, number), "an int > 0,", 1)
    vocabulary, width = weight.shape
    groups = (vocabulary, width // weight.group_size)
    for kind in ("scales", "biases"):
        part = getattr(weight, kind)
        if part is not None and tuple(part.shape) != groups:
            raise ValueError(
                f"{name}.{kind} must have shape {groups}, one for each {weight.group_size} elements of a row of "
                f"({vocabulary}, {width}); got {tuple(part.shape)}"
            )


def check_dtype(name: str, array: Array, allowed: tuple[str, ...] = FLOAT_DTYPES) -> None:
    """Raise TypeError for an array of another dtype."""
    if dtype_name(array) not in allowed:
        dtypes = f"must have one of the dtypes {', '.join(allowed)};"
        raise TypeError(
            f"{name} {'must have an integer dtype,' if 'int64' in allowed else dtypes} got {describe(array)}"
        )


def check_shape(array: Array, shape: tuple[int, ...], message: str) -> None:
    """Raise ValueError for an array of another shape. `message` has two places, for the right and for its shape."""
    if tuple(array.shape) != shape:
        raise ValueError(message.format(shape, tuple(array.shape)))
