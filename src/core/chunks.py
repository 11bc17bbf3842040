"""How many rows of logits are alive at one time: the one place that decides, for all drivers."""

import math

__all__ = ["rows_per_block", "rows_per_chunk"]

_MIB = 2**20
# A chunk's matrix products want hundreds of rows; below that the classifier is read too often for the work it brings.
_ROWS_WANTED = 256
_CHUNK_ELEMENTS = {"cpu": 2**24}
_CHUNK_ELEMENTS_ACCELERATOR = 2**27
# A block should stay in the caches of the cores through the passes over it, each core having its share.
_BLOCK_BYTES_PER_THREAD = 2 * _MIB
_BLOCK_BYTES_CPU = 8 * _MIB
_BLOCK_BYTES_ACCELERATOR = 256 * _MIB


def rows_per_chunk(rows: int, vocabulary: int, itemsize: int, workspace: int | None, device: str) -> int:
    """Return how many of `rows` rows of logits a chunk of `linear_cross_entropy` holds, at least 1.

    `workspace` bytes are never exceeded (but for one row). Chunks are made equal, so that none is much smaller.
    """
    row_bytes = vocabulary * itemsize
    if workspace is None:
        most = max(_CHUNK_ELEMENTS.get(device, _CHUNK_ELEMENTS_ACCELERATOR) // vocabulary, _ROWS_WANTED)
    else:
        most = max(workspace // row_bytes, 1)
    chunks = max(math.ceil(rows / most), 1)
    return max(math.ceil(rows / chunks), 1)


def rows_per_block(vocabulary: int, itemsize: int, device: str, threads: int) -> int:
    """Return how many rows a plain row kernel, made of whole-array operations, should pass over at one time."""
    on_cpu = min(_BLOCK_BYTES_PER_THREAD * threads, _BLOCK_BYTES_CPU)
    budget = on_cpu if device == "cpu" else _BLOCK_BYTES_ACCELERATOR
    return max(budget // (vocabulary * itemsize), 1)
