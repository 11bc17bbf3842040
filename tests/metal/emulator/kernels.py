"""The replacement of `mx.fast.metal_kernel`: the same constructor and call, executed by the emulator at once."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal.emulator import frontend
from tests.metal.emulator.build import Workshop
from tests.metal.emulator.capture import Source, capture
from tests.metal.emulator.launch import Output, run

__all__ = ["Emulator", "metal_kernel"]

metal_kernel = mx.fast.metal_kernel  # MLX's own


class Emulator:
    """Creates kernels that run in the emulator. `seed` determines the order of threads, and grows by launch."""

    def __init__(self, folder: Path) -> None:
        self.workshop = Workshop(folder)
        self.sources = []
        self.seed = itertools.count()
        self.limit = lambda source: 1024
        """The number of threads that a kernel's pipeline allows; 0 simulates a source that Apple's compiler rejects."""

    def check_limit(self, source: Source, threads: int) -> None:
        """Raise the error that MLX raises for a launch with too many threads, or for a source that does not compile."""
        limit = self.limit(source)
        if not limit:
            raise RuntimeError("[metal::Device] Unable to build metal library from source")
        if threads > limit:
            raise ValueError(
                f"Thread group size ({threads}) is greater than  the maximum allowed threads per threadgroup ({limit})."
            )

    def metal_kernel(
        self, name: str, input_names: list[str], output_names: list[str], source: str, *rest: Any, **settings: Any
    ) -> Callable[..., list[mx.array]]:
        """Return a kernel: see `mx.fast.metal_kernel`."""
        kernel = metal_kernel(name, input_names, output_names, source, *rest, **settings)
        captured = {}

        def call(
            *,
            inputs: list[mx.array],
            output_shapes: list[tuple[int, ...]],
            output_dtypes: list[mx.Dtype],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            **more: Any,
        ) -> list[mx.array]:
            key = (
                tuple((array.dtype, array.ndim, array.size < 8) for array in inputs),
                tuple(output_dtypes),
                repr(more.get("template")),
            )
            if key not in captured:
                captured[key] = capture(
                    lambda *arrays: kernel(
                        inputs=list(arrays),
                        output_shapes=output_shapes,
                        output_dtypes=output_dtypes,
                        grid=grid,
                        threadgroup=threadgroup,
                        **more,
                    ),
                    inputs,
                )
                self.sources.append(captured[key])
                frontend.check(captured[key])
            self.check_limit(captured[key], threadgroup[0] * threadgroup[1] * threadgroup[2])
            outputs = [
                Output(name, _storage(dtype), tuple(shape))
                for name, dtype, shape in zip(output_names, output_dtypes, output_shapes, strict=True)
            ]
            values = {name: _to_numpy(array) for name, array in zip(input_names, inputs, strict=True)}
            made = run(self.workshop, captured[key], values, outputs, grid, threadgroup, next(self.seed))
            return [_to_mlx(array, dtype) for array, dtype in zip(made, output_dtypes, strict=True)]

        return call


def _storage(dtype: mx.Dtype) -> Any:
    """Return the NumPy dtype with the same bytes; bfloat16 has none of its own."""
    if dtype == mx.bfloat16:
        return np.uint16
    return np.bool_ if dtype == mx.bool_ else getattr(np, str(dtype).rpartition(".")[2])


def _to_numpy(array: mx.array) -> Any:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _to_mlx(array: Any, dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(array)
