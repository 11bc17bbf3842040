"""The number of threads of a threadgroup, and how much of a row each thread keeps in registers."""

__all__ = ["LIMITS", "row_sizes", "threads_and_held"]

_SIMD_WIDTH = 32
_PACK = 16  # bytes that a thread loads at one time
_MOST_HELD = 8

LIMITS = (512, 256, 128, 64, 32)
"""The possible numbers of threads of a threadgroup, largest first.

With 512 threads, each has about 100 registers, up to 32 of them for logits. A kernel with more registers has a lower
limit.
"""


def threads_and_held(vocabulary: int, itemsize: int, limit: int = LIMITS[0]) -> tuple[int, int]:
    """Return (number of threads per row, at most `limit`; number of 16-byte packs that each keeps in registers)."""
    packs = max(vocabulary * itemsize // _PACK, 1)
    threads = min(-(-packs // _SIMD_WIDTH) * _SIMD_WIDTH, limit)
    held = 1
    while held < _MOST_HELD and held * threads < packs:
        held *= 2
    return threads, held


def row_sizes(itemsize: int) -> dict[str, int]:
    """Return vocabulary sizes that reach every loop of the kernels with unaligned rows: {reason: size}."""
    width, most = _PACK // itemsize, LIMITS[0]
    held = {f"{packs} packs a thread": packs * most * width - 1 for packs in (2, 4, 8)}
    return {
        "less than a pack": width - 1,
        "several SIMD-groups": 3 * _SIMD_WIDTH * width + 3,
        f"{most} threads": most * width,
        **held,
        "beyond registers": 13 * most * width + 5,
        "a loop beyond registers": 21 * most * width + width + 1,
    }
