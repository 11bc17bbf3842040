"""Test whether a kernel runs on this GPU in MLX, and with how many threads, before a launch is part of a graph.

The largest number of threads of a pipeline depends on its registers, which Apple's compiler chooses. MLX does not
report it: a launch with more threads fails when the graph is evaluated, in an unrelated line of the program, and so
does a source that does not compile. Therefore each kernel is launched once, with one threadgroup and at most 8 elements
per axis, and evaluated at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from xent.backends.metal.failures import KernelError
from xent.backends.metal.threads import LIMITS

__all__ = ["Launch", "fitting", "kernels_that_ran"]

_SMALL = 8  # elements: MLX passes smaller arrays in constant memory, which gives another kernel
_tried: dict[Any, "bool | KernelError"] = {}


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch over R rows, with one threadgroup per row."""

    kernel: Callable[..., list[mx.array]]
    name: str
    inputs: list[mx.array]
    template: list[tuple[str, Any]]
    shapes: list[tuple[int, ...]]
    dtypes: list[mx.Dtype]

    def run(self, rows: int, threads: int) -> list[mx.array]:
        """Return the outputs, not yet evaluated."""
        return self.kernel(
            inputs=self.inputs,
            template=self.template,
            output_shapes=self.shapes,
            output_dtypes=self.dtypes,
            grid=(threads, rows, 1),
            threadgroup=(threads, 1, 1),
        )

    def allows(self, threads: int) -> bool:
        """Whether the kernel can run with this number of threads; KernelError if it cannot run with any number."""
        inputs = tuple((_small(array.shape), array.dtype) for array in self.inputs)
        key = (self.name, tuple(self.template), inputs, threads)
        if key not in _tried:
            _tried[key] = self._trial(inputs, threads)
        found = _tried[key]
        if isinstance(found, KernelError):
            raise found
        return found

    def _trial(self, inputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...], threads: int) -> "bool | KernelError":
        zeros = [mx.zeros(shape, dtype) for shape, dtype in inputs]
        trial = Launch(self.kernel, self.name, zeros, self.template, list(map(_small, self.shapes)), self.dtypes)
        try:
            mx.eval(trial.run(1, threads))
        except (RuntimeError, ValueError) as error:
            # MLX says "Thread group size (512) is greater than the maximum allowed threads per threadgroup (384)."
            return False if "thread group size" in str(error).lower() else KernelError(str(error))
        return True


def fitting(launch_within: Callable[[int], Launch]) -> tuple[Launch, int]:
    """Return the launch for the largest limit of threads that its kernel allows, and that limit."""
    for limit in LIMITS:
        launch = launch_within(limit)
        if launch.allows(limit):
            return launch, limit
    raise KernelError(f"its pipeline allows fewer than {LIMITS[-1]} threads a threadgroup")


def kernels_that_ran() -> set[str]:
    """Return the names of the kernels that have run in this process, each with the limits of its pipelines."""
    return {f"{name} with {threads} threads" for (name, _, _, threads), ran in _tried.items() if ran is True}


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(size, _SMALL) for size in shape)
