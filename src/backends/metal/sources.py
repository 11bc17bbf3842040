"""Assemble the Metal sources: kernel bodies with the signatures that MLX generates, or with ours for PyTorch."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["FORWARD_OUTPUTS", "backward_kernel", "forward_kernel", "library"]

FORWARD_OUTPUTS = ("loss", "norm", "nll", "entropy", "predictions", "log_sum_sq_probs", "mean_logit", "grad")
_INPUTS = (
    "logits",
    "numbers",
    "target",
    "target_logits",
    "probabilities",
    "class_weight",
    "bend",
    "weight",
    "scale",
    "dead",
)
_HEADERS = ("maths", "columns", "sums", "call", "loss", "gradient")
_Kernel = Callable[..., list[Any]]


@cache
def forward_kernel() -> _Kernel:
    """Return the kernel of forward.metal, to be launched by MLX."""
    return _mlx_kernel("forward", _INPUTS, FORWARD_OUTPUTS)


@cache
def backward_kernel() -> _Kernel:
    """Return the kernel of backward.metal, to be launched by MLX."""
    return _mlx_kernel("backward", (*_INPUTS, "norm", "upstream"), ("grad",))


def _mlx_kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> _Kernel:
    import mlx.core as mx

    made: Any = mx.fast.metal_kernel(
        name=f"xent_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        header=_headers(),
        source=f"{_read('contiguous')}\n{_read(name)}",
    )
    kernel: _Kernel = made
    return kernel


def library(name: str, arguments: Sequence[str]) -> str:
    """Return a complete source, ASCII only, with the kernel "forward" or "backward" for these template arguments.

    Its name in the library is xent_forward or xent_backward.
    """
    instance = f"{name}_rows<{', '.join(arguments)}>"
    return "\n".join(
        [
            "#include <metal_stdlib>",
            "using namespace metal;",
            _headers(),
            _read("signature").replace("NAME", name),
            _read(name),
            "}",
            f'template [[host_name("xent_{name}")]] [[kernel]] decltype({instance}) {instance};',
        ]
    )


def _headers() -> str:
    return "\n".join(_read(header) for header in _HEADERS)


def _read(name: str) -> str:
    return (Path(__file__).parent / f"{name}.metal").read_text(encoding="utf-8")
