"""The memory layout of rows, and the vector size, block size and warps that kernels of whole rows use for it."""

from typing import Any, NamedTuple

from torch import Tensor

from xent.backends.torch.devices import is_padded
from xent.backends.triton.prepared import cdiv, next_power_of_2

__all__ = ["Geometry", "Sizes", "geometry", "in_blocks", "rows_of", "sizes"]

_KIB = 1024
_LINE = 64  # classes: a cache line of 16-bit logits, two of float32 logits


class Geometry(NamedTuple):
    """The memory layout of logits and their gradient.

    `logits` and `grad` are (rows in a group, stride of groups, stride of rows), with strides in elements. `skew` is the
    offset of the first logit from a multiple of 16 bytes, in elements.
    """

    logits: tuple[int, int, int]
    grad: tuple[int, int, int]
    skew: int
    vector: int
    """Elements that one load reads (16 bytes); 1 if rows of logits and gradient are aligned differently."""
    skewed: bool
    """Whether rows may begin at other addresses than multiples of 16 bytes."""
    ragged: bool
    """Whether rows may begin or end at other addresses than multiples of 16 bytes."""
    grouped: bool
    """Whether logits or gradient have more than one group of rows.

    The stride of groups may be 0, for expanded tensors.
    """

    def constants(self) -> dict[str, Any]:
        """Return members of `xent.backends.triton.groups.Way`."""
        return {"grouped": self.grouped, "skewed": self.skewed, "ragged": self.ragged, "vector": self.vector}

    def options(self) -> dict[str, bool]:
        """Return launch options: no fused multiply-add if rows may begin anywhere.

        Then a class may be in the first block, in the loop or in the last block. These are copies of the same code, and
        the compiler may fuse one copy and not another. A row's bits would depend on where it begins.
        """
        return {"enable_fp_fusion": not self.skewed}


def rows_of(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return (rows in a group, stride of groups, stride of rows) of a (..., V) tensor; None for other layouts."""
    groups: list[tuple[int, int]] = []
    if tensor.dim() == 2:
        return (tensor.shape[0] or 1, 0, tensor.stride(0))
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == size * stride:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    if len(groups) > 2:
        return None
    if not groups:
        return (1, 0, tensor.shape[-1])  # the stride that one row of a contiguous batch has
    inner, stride = groups[-1]
    return (inner, groups[0][1] if len(groups) == 2 else 0, stride)


def geometry(logits: Tensor, grad: Tensor | None) -> Geometry | None:
    """Return the layout of logits (..., V) and their gradient; None if a kernel cannot address it."""
    rows = rows_of(logits)
    places = rows if grad is None or rows is None else rows_of(grad)
    if rows is None or places is None or (logits.shape[-1] > 1 and logits.stride(-1) != 1):
        return None
    if grad is not None and grad.shape[-1] > 1 and grad.stride(-1) != 1:
        return None
    size, vocabulary = logits.itemsize, logits.shape[-1]
    vector = 16 // size
    grouped = min(rows[0], places[0]) < logits.shape[:-1].numel()
    skew = logits.data_ptr() // size % vector
    skewed = skew != 0 or rows[1] % vector != 0 or rows[2] % vector != 0
    ragged = skewed or vocabulary % vector != 0
    if (ragged and not is_padded(logits)) or (grad is not None and not _lie_alike(rows, places, skew, grad, logits)):
        return Geometry(rows, places, 0, 1, False, True, grouped)
    return Geometry(rows, places, skew if skewed else 0, vector, skewed, ragged, grouped)


def _lie_alike(
    rows: tuple[int, int, int], places: tuple[int, int, int], skew: int, grad: Tensor, logits: Tensor
) -> bool:
    """Return whether each row of the gradient has the same offset from a vector boundary as the row of logits."""
    if grad is logits:
        return True
    vector = 16 // logits.itemsize
    if grad.itemsize != logits.itemsize:
        apart = (skew, *(stride % vector for stride in rows[1:]))
        return not any((*apart, grad.data_ptr() % 16, *(stride * grad.itemsize % 16 for stride in places[1:])))
    if grad.data_ptr() // grad.itemsize % vector != skew or (places[2] - rows[2]) % vector:
        return False
    count = logits.shape[:-1].numel()
    grouped = [shape[0] for shape in (rows, places) if shape[0] < count]
    if not grouped:
        return True
    if grouped[0] != grouped[-1]:
        return False
    outer = [shape[1] if shape[0] < count else grouped[0] * shape[2] for shape in (rows, places)]
    return (outer[0] - outer[1]) % vector == 0


class Sizes(NamedTuple):
    """The block sizes and launch options of `rows_kernel` for rows of one length."""

    block: int
    lanes: int
    blocks: int
    whole: bool
    parts: int
    """Programs that share a row."""
    share: int
    """Classes of a program; the last one may have fewer."""
    options: dict[str, int]

    def constants(self) -> dict[str, Any]:
        """Return members of `xent.backends.triton.groups.Way`."""
        return {
            "whole": self.whole,
            "block": self.block,
            "lanes": self.lanes,
            "blocks": self.blocks,
            "parts": self.parts,
        }


def sizes(
    vocabulary: int,
    itemsize: int,
    place: Geometry,
    writes: bool,
    predicts: bool,
    capped: bool,
    shares: bool,
) -> Sizes:
    """Return the sizes for rows of `vocabulary` classes.

    `writes`: whether the kernel writes their gradient. `predicts`, `capped`: whether it predicts classes or caps
    logits, which takes many instructions. `shares`: whether programs may share a row. They do not
    if logits and gradient are aligned differently.

    A second pass over a row, which writes the gradient, should find the row in the L1 or L2 cache. Short rows: several
    programs run on a multiprocessor, each with its own row. Longer rows: one program per multiprocessor. Rows of more
    than 176 KiB, unaligned ones of more than 120 KiB: several programs share a row. Few warps with many registers are
    best: each warp computes a row's facts and coefficients again. Without a second pass, or with a softcap of 16-bit
    logits, rows are not shared, and four small programs per multiprocessor are best for all rows.
    Measured on an H200 (benchmarks/NOTES.md). Rows of up to 16 KiB are one block, whose largest logit is the best
    reference of sums.
    """
    row, parts = vocabulary * itemsize, 1
    is_odd = place.skewed or place.vector == 1
    if row <= 8 * _KIB:
        block, warps, registers = next_power_of_2(vocabulary), 0, 0
    elif capped and writes and itemsize == 2 and row > 16 * _KIB:
        block, warps, registers = 8 * _KIB // itemsize, 8, 64
    elif shares and writes and place.vector > 1 and row > (120 if is_odd else 176) * _KIB:
        parts, block, warps, registers = _shared(row, itemsize, is_odd, predicts)
    elif is_odd and (row <= 16 * _KIB or (writes and row > 88 * _KIB)):
        block, warps, registers = 16 * _KIB // itemsize, 16, 64
    elif not writes or is_odd or row <= 48 * _KIB:
        block, warps, registers = (8 if is_odd else 16) * _KIB // itemsize, 8, 64
    elif predicts or capped:
        block, warps, registers = 32 * _KIB // itemsize, 16, 64
    elif row <= 200 * _KIB:
        block, warps, registers = 32 * _KIB // itemsize, 8, 128
    else:
        block, warps, registers = 64 * _KIB // itemsize, 16, 128
    # A block has at least two vectors: the reference of a skewed row is found without the last vector of its first
    # block.
    block = max(block, 2 * place.vector)
    warps = warps or max(min(block * itemsize // _KIB, 8), 1)
    return in_blocks(
        vocabulary, place, block, parts, _LINE, {"num_warps": warps} | ({"maxnreg": registers} if registers else {})
    )


def in_blocks(vocabulary: int, place: Geometry, block: int, parts: int, unit: int, options: dict[str, int]) -> Sizes:
    """Return the sizes for rows in blocks of `block` classes, cut for `parts` programs at multiples of `unit` classes.

    `unit` is a multiple of the vector. Each part must have a class. If one part is longer than a block, all must be.
    """
    lanes = block if place.skewed or place.vector == 1 else block // place.vector
    share = vocabulary if parts == 1 else cdiv(cdiv(vocabulary, parts), unit) * unit
    whole = share % block == 0 and vocabulary % share == 0 and not place.skewed
    return Sizes(block, lanes, next_power_of_2(cdiv(share, block)), whole, parts, share, options)


def _shared(row: int, itemsize: int, is_odd: bool, predicts: bool) -> tuple[int, int, int, int]:
    """Return programs, block, warps and registers for rows of so many bytes that several programs share."""
    if is_odd:
        return 4 if row <= 400 * _KIB else 8, 8 * _KIB // itemsize, 8, 64
    if row <= 400 * _KIB:
        return 4, 16 * _KIB // itemsize, 8, 64 if row <= 224 * _KIB else 80
    return 4 if row <= 800 * _KIB else 8, 32 * _KIB // itemsize, *((16, 64) if predicts else (8, 128))
