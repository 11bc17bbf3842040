"""The gradient of the classifier, accumulated over chunks with bounded rounding error."""

import mlx.core as mx

from xent.backends.mlx.devices import chunk_device
from xent.core.chunks import MOST_ROUNDED_SUMS_MLX

__all__ = ["WeightGradient", "kept_dtype"]

_SLICE_BYTES = 32 * 2**20


def kept_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype of a gradient before the upstream gradient is multiplied in; float16 could overflow."""
    return mx.float32 if dtype == mx.float16 else dtype


class WeightGradient:
    """The sum of grad_logits^T @ hidden over chunks.

    `mx.addmm` rounds a sum once. On the CPU it accumulates in place, in float32 or float64. On a GPU it always writes a
    new sum. There a bfloat16 gradient of few chunks is accumulated in bfloat16, which takes half the memory and has up
    to twice the error. On Apple GPUs the sum is in slices of the vocabulary, which are concatenated at the end, so that
    only a slice exists twice. Not on NVIDIA GPUs: there MLX would copy and transpose a slice of the logits' columns
    before the product, which takes longer than the product. There the sum is hidden^T @ grad_logits, as in MLX's own
    gradient, and its transpose is returned.
    """

    def __init__(self, shape: tuple[int, int], dtype: mx.Dtype, chunks: int) -> None:
        device = chunk_device()
        on_cpu = device == "mlx-cpu"
        rounds = dtype == mx.bfloat16 and not on_cpu and chunks <= MOST_ROUNDED_SUMS_MLX
        self._wide = dtype if dtype.size >= 4 or rounds else mx.float32
        self._casts = on_cpu and dtype != self._wide
        self._transposed = device == "mlx-cuda"
        rows, width = shape
        step = rows if device != "metal" else max(_SLICE_BYTES // max(width * self._wide.size, 1), 1)
        self._parts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
        self.sums: list[mx.array] = []

    def add(self, grad_logits: mx.array, hidden: mx.array) -> None:
        """Add a chunk's (R, V)^T @ (R, D)."""
        if self._casts:
            grad_logits, hidden = grad_logits.astype(self._wide), hidden.astype(self._wide)
        factor = _overflow(hidden) if hidden.dtype == mx.float16 and hidden.size else None
        if factor is not None:
            hidden = (hidden / factor).astype(mx.float16)
        pairs = [(hidden.T, grad_logits)]
        if not self._transposed:
            pairs = [(grad_logits[:, part].T, hidden) for part in self._parts]
        if self.sums and hidden.dtype == self._wide:
            self.sums = [mx.addmm(total, *pair) for total, pair in zip(self.sums, pairs, strict=True)]
            return
        made = [(one @ other).astype(self._wide) for one, other in pairs]
        if factor is not None:
            made = [part * factor for part in made]
        self.sums = [total + part for total, part in zip(self.sums, made, strict=True)] if self.sums else made

    def result(self) -> mx.array:
        """Return the sum (V, D), not yet rounded: that is done after the upstream gradient is multiplied in."""
        made = self.sums[0] if len(self.sums) == 1 else mx.concatenate(self.sums)
        return made.T if self._transposed else made


def _overflow(hidden: mx.array) -> mx.array:
    """Return the power of two, usually 1, by which float16 (R, D) is divided so that its sum does not overflow."""
    largest = mx.abs(hidden).max().astype(mx.float32)
    return mx.power(2.0, mx.ceil(mx.log2(mx.maximum(largest * len(hidden) / 2**14, 1))))
