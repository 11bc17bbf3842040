"""The classifier's gradient, added up over chunks without losing what a low-precision sum would round off."""

import mlx.core as mx

from xent.backends.mlx.devices import device_type

__all__ = ["WeightGradient", "kept_dtype"]

_ROUNDED_SUMS = 8
_SLICE_BYTES = 32 * 2**20


def kept_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype in which a gradient waits for its upstream: float16 could overflow before 1/D is in it."""
    return mx.float32 if dtype == mx.float16 else dtype


class WeightGradient:
    """Sums grad_logits^T @ hidden over chunks.

    On the CPU `mx.addmm` adds onto the sum in the sum's own memory, in float32 at least. On a GPU it would take memory
    for a second sum, and products are added in slices of the vocabulary instead: to a float32 sum, or to a bfloat16
    one of few chunks, which takes half the memory, most of what the call takes, for at most a fifth more error.
    """

    def __init__(self, shape: tuple[int, int], dtype: mx.Dtype, chunks: int) -> None:
        self._on_cpu = device_type() == "cpu"
        rounds = dtype == mx.bfloat16 and not self._on_cpu and chunks <= _ROUNDED_SUMS
        self._wide = dtype if dtype.size >= 4 or rounds else mx.float32
        self._step = max(_SLICE_BYTES // max(shape[1] * self._wide.size, 1), 1)
        self.sum = mx.zeros(shape, self._wide)
        """(V, D); it waits for its upstream gradient as it is, to be rounded once, after that."""

    def add(self, grad_logits: mx.array, hidden: mx.array) -> None:
        """Add a chunk's (R, V)^T @ (R, D)."""
        if self._on_cpu:
            self.sum = mx.addmm(self.sum, grad_logits.astype(self._wide).T, hidden.astype(self._wide))
            return
        for start in range(0, self.sum.shape[0], self._step):
            part = slice(start, start + self._step)
            self.sum = self.sum.at[part].add((grad_logits[:, part].T @ hidden).astype(self._wide))
