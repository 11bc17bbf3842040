"""Launches of kernels: each is compiled once per kind of arguments, and later launches skip Triton's binder.

The binder takes 20 to 100 us of host time per launch. These kernels are specialised only for their constants and the
types of their arguments (`kernel`). So a compiled kernel is correct for every later launch with the same types and
constants, at any address. Addresses are passed as integers, because Triton's launcher queries the driver for every
tensor, but not for an integer. Triton's knobs are those of the first launch of a kind.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import triton
from torch import Tensor
from torch.nn import Parameter

from xent.backends.torch.recorder import Derived, is_recording, note_launch, paused
from xent.backends.triton.machine import release

__all__ = ["cdiv", "is_interpreted", "kernel", "launch", "next_power_of_2"]

_IS_TRIED = release() in ((3, 6), (3, 7))  # releases that this way to launch was tested with
_compiled: dict[Any, "_Compiled"] = {}
_MOST = 4096  # kinds; if there are more, the cache is cleared


def kernel(function: Callable[..., Any]) -> Any:
    """Return a Triton kernel that is specialised only for its constants and the types of its other arguments."""
    names = [name for name, parameter in inspect.signature(function).parameters.items() if not _is_constant(parameter)]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


def _is_constant(parameter: inspect.Parameter) -> bool:
    return "constexpr" in str(parameter.annotation)


def launch(function: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], **options: int) -> None:
    """Launch `programs` programs. `options` are Triton's num_warps, maxnreg and enable_fp_fusion."""
    if is_interpreted(function):  # without the options
        _interpret(function, programs, arguments, constants)
        return
    if not _IS_TRIED:
        function[(programs,)](*arguments, **constants, **options)
        _note(None, programs, ())
        return
    kinds, values, noted = _examined(arguments)
    device = triton.runtime.driver.active.get_current_device()
    key = (function, device, *kinds, *constants.values(), *options.values())
    found = _compiled.get(key)
    if found is not None:
        found(programs, values, _queue(device))
    else:
        made = function[(programs,)](*arguments, **constants, **options)
        if isinstance(made, triton.compiler.CompiledKernel):  # unless a hook kept Triton from compiling
            if len(_compiled) >= _MOST:
                _compiled.clear()
            found = _compiled[key] = _Compiled(made, [constants[name] for name in function.arg_names[len(values) :]])
    _note(found, programs, noted)


def is_interpreted(function: Any) -> bool:
    """Whether Triton interprets a kernel, on tensors of any device: its programs run one after the other."""
    return not isinstance(function, triton.JITFunction)


def _examined(arguments: tuple[Any, ...]) -> tuple[list[Any], list[Any], tuple[Any, ...]]:
    """Return the arguments' kinds, their values with addresses for tensors, and the arguments for a recording."""
    kinds: list[Any] = []
    values: list[Any] = []
    noted = arguments
    for index, argument in enumerate(arguments):
        kind = argument.__class__
        if kind is Tensor or kind is Parameter:
            kinds.append(argument.dtype)
            values.append(argument.data_ptr())
            continue
        values.append(argument)
        if kind is int:
            kinds.append(-(2**31) <= argument < 2**31)
        elif argument is None or kind is float or kind is bool:
            kinds.append(kind)
        else:  # a descriptor for the copy engine; these determine its layout
            kinds.append((argument.base.dtype, *argument.block_shape))
            if is_recording():
                again = Derived(argument.base, partial(_of_tensor, argument.__class__, _fields_of(argument)))
                noted = (*noted[:index], again, *noted[index + 1 :])
    return kinds, values, noted


def _fields_of(descriptor: Any) -> dict[str, Any]:
    """Return the fields of a descriptor, without its tensor."""
    return {field.name: getattr(descriptor, field.name) for field in fields(descriptor) if field.name != "base"}


def _of_tensor(kind: Any, others: dict[str, Any], tensor: Tensor) -> Any:
    """Return a descriptor of a tensor."""
    return kind(base=tensor, **others)


class _Compiled:
    """A kernel compiled for a kind of arguments."""

    def __init__(self, kernel: Any, constants: list[Any]) -> None:
        self.kernel, self._constants = kernel, tuple(constants)
        self._run, self._function, self._metadata = kernel.run, kernel.function, kernel.packed_metadata

    def __call__(self, programs: int, values: list[Any], queue: int | None) -> None:
        """Launch `programs` programs on a `_queue`. `values` are the arguments, with addresses instead of tensors."""
        if queue is None:
            self.kernel[(programs, 1, 1)](*values, *self._constants)
            return
        place = (programs, 1, 1, queue, self._function, self._metadata)
        self._run(*place, None, None, None, *values, *self._constants)


def _queue(device: int | None = None) -> int | None:
    """Return the current stream of a device, by default the current one.

    None if a profiler asked Triton to call it at launches: then they must be Triton's own.
    """
    runtime = triton.knobs.runtime
    if getattr(runtime.launch_enter_hook, "calls", True) or getattr(runtime.launch_exit_hook, "calls", True):
        return None
    driver = triton.runtime.driver.active
    stream: int = driver.get_current_stream(driver.get_current_device() if device is None else device)
    return stream


def _interpret(function: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    if not is_recording():
        function[(programs,)](*arguments, **constants)
        return
    with paused():
        function[(programs,)](*arguments, **constants)
    note_launch(
        lambda programs, values, _: function[(programs,)](*values, **constants),
        programs,
        arguments,
        False,
        lambda: None,
    )


def _note(found: Any, programs: int, arguments: tuple[Any, ...]) -> None:
    if is_recording():
        note_launch(found, programs, arguments, True, _queue)


def cdiv(count: int, size: int) -> int:
    """Return count / size, rounded up. `triton.cdiv` takes a hundred times as long on the host."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two >= count, in a hundredth of the time of `triton.next_power_of_2`."""
    return 1 << max(count - 1, 0).bit_length()
