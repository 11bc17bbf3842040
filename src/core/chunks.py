"""The sizes of chunks and tiles of logits, for all drivers."""

import math

__all__ = [
    "MOST_ROUNDED_SUMS",
    "MOST_ROUNDED_SUMS_MLX",
    "rows_per_chunk",
    "tile_shape",
]

MOST_ROUNDED_SUMS = 16
"""The largest number of chunks over which a bfloat16 gradient is accumulated in bfloat16."""
MOST_ROUNDED_SUMS_MLX = 8
"""The same for MLX."""

_MIB = 2**20
# Matrix products need some hundred rows per chunk. With fewer, they are limited by reading the classifier.
_ROWS_WANTED = 256
# MLX on NVIDIA GPUs stores the gradient of a chunk beside its logits, so chunks are a little smaller. If the classifier
# is trained, MLX allocates a new sum of its gradient for each chunk in the queue, so chunks are few and large.
# On Apple silicon memory is short, and a few hundred rows are enough for fast matrix products.
# On a CPU, chunks of 64 rows are not slower in MLX: 0.92 times the time of 256 rows at 512x128x16384 (tokens x width x
# vocabulary). Under mx.compile, 1024x64x32768 in bfloat16 takes 50 MiB with 64 rows and 192 MiB with 512 rows; the
# unfused loss takes 196 MiB.
_CHUNKS = {"cpu": (2**24, 256), "mlx-cpu": (2**21, 64), "mlx-cuda": (13 * 2**24, 256), "metal": (2**26, 256)}
"""Device -> elements of a chunk, and the least number of rows."""
_CHUNK_BYTES_MLX_CUDA_SUMMED = 2**30
# On an accelerator each chunk reads and writes the gradient of the classifier once. With 2048 rows this is cheap. A
# chunk has fewer rows if the vocabulary is very large (a bound on the memory of its logits), and more if it is small:
# 4096 rows up to 53760 classes. With more classes, a batch of less than four chunks is split into four chunks of at
# least 1024 rows. A batch of at most 2048 rows is one chunk, so that the host need not wait for a count. If each chunk
# rounds the gradient once more, the chunks of a large batch are up to twice as large.
_FEWEST, _ENOUGH, _MANY = 1024, 2048, 4096
_FEW_CLASSES_ELEMENTS = 210 * _MIB
_LEAST_ELEMENTS, _MOST_ELEMENTS = 2**27, 2**29
_GROWN_ELEMENTS = 420 * _MIB  # times the growth: the bound for large batches, if it exceeds 2**29
_MOST_GROWTH = 2
# PyTorch's matrix products work on tiles of 256 or 128 rows. Eight chunks of 1024 rows take less time than nine of 911.
_ROWS_MULTIPLES, _ROWS_MULTIPLES_MLX = (256, 128), (128,)
_MOST_EXCESS = 1 / 8  # by which rounding up may exceed a default size
_TILE_BYTES = 32 * _MIB
_TILE_ROWS = 8192
_TILE_CLASSES = 256


def rows_per_chunk(
    rows: int, vocabulary: int, itemsize: int, workspace: int | None, device: str, sums: bool = False
) -> int:
    """Return the number of rows of a chunk of `linear_cross_entropy`, at least 1, for a call of `rows` rows.

    `device` is PyTorch's device type, or for MLX "mlx-cpu", "metal" or "mlx-cuda". `sums` says whether each chunk
    rounds the gradient of the classifier once more, or with MLX on NVIDIA GPUs writes a new one. The logits of a chunk
    take at most `workspace` bytes, unless one row takes more. All chunks but the last have this size.
    """
    if workspace is not None:
        most = max(workspace // (vocabulary * itemsize), 1)
    elif device == "mlx-cuda" and sums:
        size, budget = vocabulary * itemsize, _CHUNK_BYTES_MLX_CUDA_SUMMED
        target_rows = rows * size // MOST_ROUNDED_SUMS_MLX
        most = max(min(max(target_rows, budget), _MOST_GROWTH * budget) // size, _ROWS_WANTED)
    elif device in _CHUNKS:
        elements, least = _CHUNKS[device]
        most = max(elements // vocabulary, least)
    else:
        quarter = rows // 4
        growth = min(max(quarter / _ENOUGH, 1), _MOST_GROWTH if sums else 1)
        target_rows = _ENOUGH if rows <= _ENOUGH else max(min(quarter, int(_ENOUGH * growth)), _FEWEST)
        if _MANY * vocabulary <= _FEW_CLASSES_ELEMENTS:
            target_rows = max(target_rows, _MANY)
        elements = min(
            max(target_rows * vocabulary, _LEAST_ELEMENTS), max(_MOST_ELEMENTS, int(_GROWN_ELEMENTS * growth))
        )
        most = max(elements // vocabulary, _ROWS_WANTED)
    if rows <= most:
        return max(rows, 1)
    even = math.ceil(rows / math.ceil(rows / most))
    if device in ("cpu", "mlx-cpu"):
        return even
    is_mlx = device in ("metal", "mlx-cuda")
    largest = min(most if is_mlx or workspace is not None else int(most * (1 + _MOST_EXCESS)), rows)
    multiples = _ROWS_MULTIPLES_MLX if is_mlx else _ROWS_MULTIPLES
    rounded = (-(-even // multiple) * multiple for multiple in multiples)
    return next((each for each in rounded if each <= largest), even)


def tile_shape(rows: int, vocabulary: int, itemsize: int, workspace: int | None) -> tuple[int, int]:
    """Return (rows, classes) of a tile of logits, for a forward pass that reads each tile once.

    A tile fits into the L2 cache of an accelerator. It has many rows and few classes, so that the classifier is read
    once.
    """
    budget = max(min(_TILE_BYTES, workspace or _TILE_BYTES) // itemsize, 1)
    tall = max(min(rows, _TILE_ROWS, max(budget // _TILE_CLASSES, 1)), 1)
    return tall, max(min(budget // tall // _TILE_CLASSES * _TILE_CLASSES or budget // tall, vocabulary), 1)
