"""Launches of kernels: each is compiled once per kind of arguments, and later launches skip Triton's binder.

The binder takes 20 to 65 us of host time per launch, a launch of the compiled kernel 12 to 26 us. These kernels are
specialised for their constants, the types of their arguments, and the alignment of the tensors in argument groups
(`kernel`). So a compiled kernel is correct for every later launch with the same key.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

__all__ = ["cdiv", "is_interpreted", "kernel", "launch", "next_power_of_2"]

_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
_MOST = 4096  # kinds; if there are more, the cache is cleared


def kernel(function: Callable[..., Any]) -> Any:
    """Return a Triton kernel. Numbers among its arguments have an annotation like "i64", and are not specialised."""
    names = [name for name, parameter in inspect.signature(function).parameters.items() if not _is_constant(parameter)]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


def _is_constant(parameter: inspect.Parameter) -> bool:
    return "constexpr" in str(parameter.annotation)


def launch(function: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], **options: Any) -> None:
    """Launch `programs` programs on the current device and stream.

    `arguments` are tensors, None, numbers, argument groups and tensor descriptors, in the order of the parameters.
    `options` are Triton's num_warps, maxnreg and enable_fp_fusion, always in the same order.
    """
    if is_interpreted(function):  # without the options
        function[(programs,)](*arguments, **constants)
        return
    options.setdefault("enable_fp_fusion", True)
    # id: a kernel's own hash is computed anew each time. It lives as long as its module.
    kinds: list[Any] = [id(function), torch.cuda.current_device()]
    for one in arguments:
        if one is None:
            kinds.append(None)
        elif isinstance(one, Tensor):
            kinds.append(one.dtype)
        elif not isinstance(one, (int, float)):
            kinds.append(_kind(one))
    key = (*kinds, *constants.values(), *options.values())
    found = _compiled.get(key)
    if found is not None:
        made, values = found
        made[(programs, 1, 1)](*arguments, *values)
        return
    made = function[(programs,)](*arguments, **constants, **options)
    if isinstance(made, triton.compiler.CompiledKernel):  # unless a hook kept Triton from compiling
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = made, tuple(constants[name] for name in function.arg_names[len(arguments) :])


def _kind(argument: Any) -> Any:
    """Return what a kernel is compiled for in a group of tensors, or in a descriptor for the copy engine."""
    if isinstance(argument, tuple):  # Triton specialises the members of groups for aligned addresses
        return tuple([None if one is None else (one.dtype, one.data_ptr() % 16 == 0) for one in argument])
    return (argument.base.dtype, *argument.block_shape)


def is_interpreted(function: Any) -> bool:
    """Whether Triton interprets a kernel, on tensors of any device: its programs run one after the other."""
    return not isinstance(function, triton.JITFunction)


def cdiv(count: int, size: int) -> int:
    """Return count / size, rounded up. `triton.cdiv` takes a hundred times as long on the host."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two >= count, in a hundredth of the time of `triton.next_power_of_2`."""
    return 1 << max(count - 1, 0).bit_length()
