"""From a block of logits to a launch of the Metal kernels: template arguments, threads, arrays."""

from typing import Any

import mlx.core as mx

from xent.backends.metal.sources import FORWARD_OUTPUTS, backward_kernel, forward_kernel
from xent.backends.mlx.kernels import Asked, Found, RowFacts

__all__ = ["backward", "forward", "threads_and_held"]

_SIMD_WIDTH = 32
_DEVICE_SIZE = 8  # elements; arrays of fewer are put into constant memory, where the logits' pointers do not go
_PACK = 16  # bytes that a thread loads at a time
# 512 threads leave each some 100 registers, so that no kernel needs more than there are; of those up to 32 hold logits.
_MOST_THREADS = 512
_MOST_HELD = 8


def forward(logits: mx.array, facts: RowFacts, asked: Asked) -> Found:
    """Take a block: see `xent.backends.mlx.kernels.Kernels.forward`."""
    count, vocabulary = logits.shape
    threads, held = threads_and_held(vocabulary, logits.dtype)
    results: dict[str, tuple[bool, tuple[int, ...], mx.Dtype]] = {
        "loss": (True, (count,), mx.float32),
        "norm": (asked.norm, (count, 2), mx.float32),
        "nll": (asked.nll, (count,), mx.float32),
        "entropy": (asked.entropy, (count,), mx.float32),
        "predictions": (asked.predictions, (count,), mx.int32),
        "grad": (asked.grad, (count, vocabulary), logits.dtype),
    }
    wanted, shapes, dtypes = zip(*(results[name] for name in FORWARD_OUTPUTS), strict=True)
    made = forward_kernel()(
        inputs=_inputs(logits, facts),
        template=[
            *_template(logits, facts),
            ("ENTROPY", asked.entropy),
            ("NLL", asked.nll),
            ("PREDICTIONS", asked.predictions),
            ("NORM", asked.norm),
            ("GRAD", asked.grad),
            ("SKIPS_DEAD", not asked.dead),
            ("HELD", held if asked.grad else 1),
        ],
        output_shapes=[shape if asks else (1,) for asks, shape in zip(wanted, shapes, strict=True)],
        output_dtypes=list(dtypes),
        grid=(threads, count, 1),
        threadgroup=(threads, 1, 1),
    )
    named = zip(FORWARD_OUTPUTS, made, wanted, strict=True)
    return Found(**{name: array for name, array, asks in named if asks})


def backward(logits: mx.array, facts: RowFacts, norm: mx.array) -> mx.array:
    """Return the gradient of a block: see `xent.backends.mlx.kernels.Kernels.backward`."""
    threads, _ = threads_and_held(logits.shape[1], logits.dtype)
    (grad,) = backward_kernel()(
        inputs=[*_inputs(logits, facts), norm],
        template=_template(logits, facts),
        output_shapes=[logits.shape],
        output_dtypes=[logits.dtype],
        grid=(threads, logits.shape[0], 1),
        threadgroup=(threads, 1, 1),
    )
    return grad


def threads_and_held(vocabulary: int, dtype: mx.Dtype) -> tuple[int, int]:
    """Return how many threads share a row, and how many 16-byte packs of it each keeps in registers."""
    packs = max(vocabulary * dtype.size // _PACK, 1)
    threads = min(-(-packs // _SIMD_WIDTH) * _SIMD_WIDTH, _MOST_THREADS)
    held = 1
    while held < _MOST_HELD and held * threads < packs:
        held *= 2
    return threads, held


def _template(logits: mx.array, facts: RowFacts) -> list[tuple[str, Any]]:
    return [
        ("T", logits.dtype),
        ("TARGET", facts.target is not None),
        ("EXACT", facts.target_logits is not None),
        ("WEIGHTED", facts.class_weight is not None),
        ("SMOOTHED", facts.terms.smoothing),
        ("CAPPED", facts.terms.softcap),
    ]


def _inputs(logits: mx.array, facts: RowFacts) -> list[mx.array]:
    """Return the inputs in the kernels' order; what the call does not have is not read."""
    if logits.size < _DEVICE_SIZE:
        logits = mx.pad(logits, [(0, _DEVICE_SIZE), (0, 0)])
    optional = (facts.target, facts.target_logits, facts.probabilities, facts.class_weight)
    return [
        logits,
        facts.numbers,
        *(facts.numbers if array is None else array for array in optional),
        facts.weight,
        facts.scale,
        facts.dead,
    ]
