"""How kernels are launched: compiled once per kind of arguments; repeat launches skip Triton's binder.

The binder takes the host 20 to 100 us a launch. Kernels here ask Triton to specialise on nothing but their constants
and the types of their arguments (`kernel`), so that a compiled kernel is right for every later launch with the same
types and constants, wherever its memory begins. Addresses are passed as integers: Triton's launcher asks the driver
about every tensor, and believes an integer. Triton's knobs are those of the first launch of a kind.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from xent.backends.triton.machine import release

__all__ = ["cdiv", "kernel", "launch", "next_power_of_2"]

_IS_TRIED = release() in ((3, 6), (3, 7))  # releases whose compiled kernels were launched like this
_compiled: dict[Any, Any] = {}
_MOST = 4096  # kinds; beyond that all are forgotten


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` with Triton for its constants and the types of its other arguments alone."""
    names = [name for name, parameter in inspect.signature(function).parameters.items() if not _is_constant(parameter)]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


def _is_constant(parameter: inspect.Parameter) -> bool:
    return "constexpr" in str(parameter.annotation)


def launch(function: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], **options: int) -> None:
    """Launch so many programs. `options` are Triton's: num_warps, maxnreg, enable_fp_fusion."""
    if not isinstance(function, triton.JITFunction):  # the interpreter knows few options, and heeds none
        function[(programs,)](*arguments, **constants)
        return
    if not _IS_TRIED:
        function[(programs,)](*arguments, **constants, **options)
        return
    kinds: list[Any] = [function, triton.runtime.driver.active.get_current_device()]
    values: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            kinds.append(argument.dtype)
            values.append(argument.data_ptr())
        else:
            kinds.append(_kind(argument))
            values.append(argument)
    key = (*kinds, *constants.values(), *options.values())
    found = _compiled.get(key)
    if found is None:
        compiled = function[(programs,)](*arguments, **constants, **options)
        if isinstance(compiled, triton.compiler.CompiledKernel):  # unless a hook kept Triton from compiling
            if len(_compiled) >= _MOST:
                _compiled.clear()
            _compiled[key] = compiled, [constants[name] for name in function.arg_names[len(arguments) :]]
        return
    compiled, rest = found
    compiled[(programs, 1, 1)](*values, *rest)


def cdiv(count: int, size: int) -> int:
    """Return how many blocks of that size hold `count`; `triton.cdiv` takes the host a hundred times as long."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two that is not less; like `triton.next_power_of_2`, in a hundredth of its time."""
    return 1 << max(count - 1, 0).bit_length()


def _kind(argument: Any) -> Any:
    """Return what a kernel is compiled for of an argument."""
    kind = type(argument)
    if kind is int:
        return -(2**31) <= argument < 2**31
    if argument is None or kind is float or kind is bool:
        return kind
    if isinstance(argument, Tensor):
        return argument.dtype
    return argument.base.dtype, *argument.block_shape  # a matrix for the copy engine, whose layout follows from these
