"""How kernels are launched: Triton looks at the arguments of the first launch of a kind, and the others go by without.

That look takes the host 20 to 100 us, longest where matrices are described to the copy engine, and a chunk of
`linear_cross_entropy` has a dozen launches: with a small classifier the GPU would wait for the host. A kernel is
compiled for its constants, for the types of its other arguments, and for what Triton specialises on: whether an integer
is 1 or a multiple of 16, and whether memory begins on a boundary of 16 bytes. Launches that have all of that in common
run the same compiled kernel. Triton's knobs are those of the first of them.
"""

from typing import Any

import triton
from torch import Tensor

from xent.backends.triton.machine import release

__all__ = ["cdiv", "launch", "next_power_of_2"]

_IS_TRIED = release() in ((3, 6), (3, 7))  # whose compiled kernels were launched like this
_compiled: dict[Any, tuple[Any, list[str]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch so many programs. The constants may be followed by Triton's options."""
    if not isinstance(kernel, triton.JITFunction) or not _IS_TRIED:
        kernel[grid](*arguments, **constants)
        return
    key = (kernel.fn, triton.runtime.driver.active.get_current_device(), *map(_kind, arguments), *constants.items())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **constants)
        if isinstance(compiled, triton.compiler.CompiledKernel):  # unless a hook kept Triton from compiling
            _compiled[key] = compiled, kernel.arg_names[len(arguments) :]
        return
    compiled, names = found
    compiled[(*grid, 1, 1)](*arguments, *[constants[name] for name in names])


def cdiv(count: int, size: int) -> int:
    """Return how many blocks of that size hold `count`; `triton.cdiv` takes the host a hundred times as long."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two that is not less; like `triton.next_power_of_2`, in a hundredth of its time."""
    return 1 << max(count - 1, 0).bit_length()


def _kind(argument: Any) -> Any:
    """Return what a kernel is compiled for of an argument."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    kind = type(argument)
    if kind is int:
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    if argument is None or kind in (bool, float):
        return kind
    return argument.base.dtype, *argument.block_shape  # a matrix for the copy engine, whose layout follows from these
