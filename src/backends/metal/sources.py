"""The Metal sources, and the kernels that MLX makes of them: each built once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

__all__ = ["FORWARD_OUTPUTS", "backward_kernel", "forward_kernel"]

FORWARD_OUTPUTS = ("loss", "norm", "nll", "entropy", "predictions", "grad")
_INPUTS = ("logits", "numbers", "target", "target_logits", "probabilities", "class_weight", "weight", "scale", "dead")
_HEADERS = ("maths", "columns", "sums", "call", "loss", "gradient")
_Kernel = Callable[..., list[mx.array]]


@cache
def forward_kernel() -> _Kernel:
    """Return the kernel of forward.metal."""
    return _kernel("forward", _INPUTS, FORWARD_OUTPUTS)


@cache
def backward_kernel() -> _Kernel:
    """Return the kernel of backward.metal."""
    return _kernel("backward", (*_INPUTS, "norm"), ("grad",))


def _kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> _Kernel:
    made: Any = mx.fast.metal_kernel(
        name=f"xent_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        header="\n".join(_read(header) for header in _HEADERS),
        source=_read(name),
    )
    kernel: _Kernel = made
    return kernel


def _read(name: str) -> str:
    return (Path(__file__).parent / f"{name}.metal").read_text(encoding="utf-8")
