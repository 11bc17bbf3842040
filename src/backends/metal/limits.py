"""Whether a kernel runs on this GPU, and with how many threads: found out by MLX before a launch enters a graph.

How many threads a pipeline may have follows from its registers, which Apple's compiler chooses, and MLX tells nobody: a
launch with more fails when the graph is evaluated, in somebody else's line, and so does a source that does not compile.
So each kernel is tried once, on a threadgroup of its own over at most 8 elements an axis, and evaluated there and then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from xent.backends.metal.failures import KernelError
from xent.backends.metal.threads import LIMITS

__all__ = ["Launch", "fitting", "kernels_that_ran"]

_SMALL = 8  # elements: an array of fewer lies in constant memory, for which the kernel is another one
_tried: dict[Any, "bool | KernelError"] = {}


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch over R rows, a threadgroup each."""

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
        """Whether the kernel may have so many threads; KernelError if it does not run whatever their number."""
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
            # MLX's words: "Thread group size (512) is greater than the maximum allowed threads per threadgroup (384)."
            return False if "thread group size" in str(error).lower() else KernelError(str(error))
        return True


def fitting(launch_within: Callable[[int], Launch]) -> tuple[Launch, int]:
    """Return the first of `launch_within(limit)` whose kernel allows so many threads, and the limit."""
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
