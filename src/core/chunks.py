"""How many rows of logits are alive at one time: the one place that decides, for all drivers."""

import math

__all__ = [
    "MOST_ROUNDED_SUMS",
    "MOST_ROUNDED_SUMS_MLX",
    "rows_per_block",
    "rows_per_chunk",
    "tile_shape",
]

MOST_ROUNDED_SUMS = 16
"""Over how many chunks a bfloat16 gradient may be summed in bfloat16."""
MOST_ROUNDED_SUMS_MLX = 8
"""The same for MLX."""

_MIB = 2**20
# A chunk's matrix products want hundreds of rows; below that the classifier is read too often for the work it brings.
_ROWS_WANTED = 256
_CHUNK_ELEMENTS_CPU = 2**24
# On an accelerator the classifier's gradient is read and written once a chunk: 2048 rows make that cheap, unless the
# vocabulary is so large that their logits outgrow what else is alive, or so small that more cost nothing. Of a batch of
# fewer than four such chunks one is a quarter, if that is enough rows for a product; but a batch that fits into one is
# one, for which the host has nothing to wait for. Where every further sum rounds the gradient once more, the chunks of
# a large batch are up to twice as large.
_ROWS_WANTED_ACCELERATOR = (1024, 2048)
_CHUNKS_WANTED_ACCELERATOR = 4
_CHUNK_ELEMENTS_ACCELERATOR = (2**27, 420 * 2**20)
_MOST_GROWTH_ACCELERATOR = 2
# MLX on NVIDIA makes the gradient of a chunk beside its logits, so a chunk is a little smaller; but it holds a new sum
# of the classifier's gradient for each chunk that waits for the GPU, so where there is one, chunks are few and large.
# On Apple silicon the logits are what memory is short for, and a few hundred rows keep its matrix units busy.
_CHUNK_ELEMENTS_MLX_CUDA = 13 * 2**24
_CHUNK_BYTES_MLX_CUDA_SUMMED = 2**30
_CHUNK_ELEMENTS_METAL = 2**26
# On a CPU MLX's products take no longer with 64 rows: 0.92 of the time of 256 rows at 512x128x16384. Under mx.compile
# 1024x64x32768 in bfloat16 takes 50 MiB with 64 rows, 192 with 512, and the unfused loss 196.
_CHUNK_ELEMENTS_MLX_CPU = 2**21
_ROWS_WANTED_MLX_CPU = 64
# Matrix products work on tiles of this many rows.
_ROWS_MULTIPLE = 128
# A block should stay in the caches of the cores through the passes over it, each core having its share.
_BLOCK_BYTES_PER_THREAD = 2 * _MIB
_BLOCK_BYTES_CPU = 8 * _MIB
_BLOCK_BYTES_ACCELERATOR = 256 * _MIB
_TILE_BYTES = 32 * _MIB
_TILE_ROWS = 8192
_TILE_CLASSES = 256

_CHUNK_ELEMENTS = {
    "cpu": _CHUNK_ELEMENTS_CPU,
    "mlx-cpu": _CHUNK_ELEMENTS_MLX_CPU,
    "mlx-cuda": _CHUNK_ELEMENTS_MLX_CUDA,
    "metal": _CHUNK_ELEMENTS_METAL,
}


def rows_per_chunk(
    rows: int, vocabulary: int, itemsize: int, workspace: int | None, device: str, sums: bool = False
) -> int:
    """Return how many of `rows` rows of logits a chunk of `linear_cross_entropy` holds, at least 1.

    `device` is PyTorch's name for one, or for MLX "mlx-cpu", "metal" or "mlx-cuda". `sums`: whether each chunk rounds
    the classifier's gradient once more, or with MLX on NVIDIA writes another. `workspace` bytes are never exceeded (but
    for one row). Chunks are made equal, so that none is much smaller.
    """
    if workspace is not None:
        most = max(workspace // (vocabulary * itemsize), 1)
    elif device == "mlx-cuda" and sums:
        size, budget = vocabulary * itemsize, _CHUNK_BYTES_MLX_CUDA_SUMMED
        wanted = rows * size // MOST_ROUNDED_SUMS_MLX
        most = max(min(max(wanted, budget), _MOST_GROWTH_ACCELERATOR * budget) // size, _ROWS_WANTED)
    elif device in _CHUNK_ELEMENTS:
        least = _ROWS_WANTED_MLX_CPU if device == "mlx-cpu" else _ROWS_WANTED
        most = max(_CHUNK_ELEMENTS[device] // vocabulary, least)
    else:
        fewest, enough = _ROWS_WANTED_ACCELERATOR
        quarter = rows // _CHUNKS_WANTED_ACCELERATOR
        growth = min(max(quarter / enough, 1), _MOST_GROWTH_ACCELERATOR if sums else 1)
        wanted = enough if rows <= enough else max(min(quarter, int(enough * growth)), fewest)
        least, largest = _CHUNK_ELEMENTS_ACCELERATOR
        elements = min(max(wanted * vocabulary, least), int(largest * growth))
        most = max(elements // vocabulary, _ROWS_WANTED)
    chunks = max(math.ceil(rows / most), 1)
    even = max(math.ceil(rows / chunks), 1)
    rounded = -(-even // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
    return rounded if device not in ("cpu", "mlx-cpu") and rounded <= min(most, rows) else even


def rows_per_block(vocabulary: int, itemsize: int, device: str, threads: int) -> int:
    """Return how many rows a plain row kernel, made of whole-array operations, should pass over at one time."""
    on_cpu = min(_BLOCK_BYTES_PER_THREAD * threads, _BLOCK_BYTES_CPU)
    budget = on_cpu if device == "cpu" else _BLOCK_BYTES_ACCELERATOR
    return max(budget // (vocabulary * itemsize), 1)


def tile_shape(rows: int, vocabulary: int, itemsize: int, workspace: int | None) -> tuple[int, int]:
    """Return how many rows and classes of logits a tile of a forward pass holds that looks at a tile once.

    It fits into the cache of an accelerator. Many rows and few classes: then the classifier is read once.
    """
    budget = max(min(_TILE_BYTES, workspace or _TILE_BYTES) // itemsize, 1)
    tall = max(min(rows, _TILE_ROWS, max(budget // _TILE_CLASSES, 1)), 1)
    return tall, max(min(budget // tall // _TILE_CLASSES * _TILE_CLASSES or budget // tall, vocabulary), 1)
