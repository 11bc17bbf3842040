"""The Metal sources, and the kernels that MLX makes of them: each built once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

__all__ = ["BACKWARD_OUTPUTS", "FORWARD_OUTPUTS", "INPUTS", "backward_kernel", "forward_kernel"]

INPUTS = ("logits", "numbers", "target", "target_logits", "probabilities", "class_weight", "weight", "scale", "dead")
FORWARD_OUTPUTS = ("loss", "norm", "nll", "entropy", "predictions", "grad")
BACKWARD_OUTPUTS = ("grad",)
_HEADERS = ("maths", "columns", "sums", "rows")


@cache
def forward_kernel() -> Callable[..., list[mx.array]]:
    """Return the kernel of forward.metal."""
    return _kernel("forward", INPUTS, FORWARD_OUTPUTS)


@cache
def backward_kernel() -> Callable[..., list[mx.array]]:
    """Return the kernel of backward.metal."""
    return _kernel("backward", (*INPUTS, "norm"), BACKWARD_OUTPUTS)


def _kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    return mx.fast.metal_kernel(
        name=f"xent_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        header="\n".join(_read(header) for header in _HEADERS),
        source=_read(name),
    )


def _read(name: str) -> str:
    return (Path(__file__).parent / f"{name}.metal").read_text(encoding="utf-8")
