"""Detect wrong quantized products of MLX: on NVIDIA GPUs those of MLX 0.32.4 are wrong for small sizes."""

from typing import Any

import mlx.core as mx
import pytest

import xent
from xent.backends.mlx.devices import chunk_device

__all__ = ["expect_right_products"]


def expect_right_products(x: mx.array, weight: xent.QuantizedWeight, **form: Any) -> None:
    """Mark the running test as an expected failure if MLX's products of rows (N, D) or of gradients are wrong."""
    if chunk_device() != "mlx-cuda":
        return
    parts = {"scales": weight.scales, "biases": weight.biases, **form}
    unpacked = mx.dequantize(weight.packed, **parts).astype(x.dtype)
    for rows in (x, x[:3], x[:1]):
        logits = rows @ unpacked.T
        pairs = [
            (mx.quantized_matmul(rows, weight.packed, transpose=True, **parts), logits),
            (mx.quantized_matmul(logits, weight.packed, transpose=False, **parts), logits @ unpacked),
        ]
        for found, expected in pairs:
            found, expected = found.astype(mx.float32), expected.astype(mx.float32)
            if not mx.abs(found - expected).max().item() <= 0.1 * mx.abs(expected).max().item():
                pytest.xfail("MLX's own quantized_matmul is wrong here")
