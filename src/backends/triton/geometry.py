"""The memory layout of rows, and the vector size, block size and warps that kernels of whole rows use for it."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from xent.backends.torch.contract import Block
from xent.backends.torch.devices import is_padded
from xent.backends.torch.memory import logit_blocks
from xent.backends.triton.launches import Way, cdiv, next_power_of_2

__all__ = ["Layout", "Placed", "Size", "Strides", "in_blocks", "placed", "rows_of", "sizes"]

_KIB = 1024
_LINE = 64  # classes: a cache line of 16-bit logits, two of float32 logits

Strides = tuple[int, int, int]
"""(rows in a group, stride of groups, stride of rows), in elements. The stride of groups may be 0."""


class Layout(NamedTuple):
    """Members of `xent.backends.triton.launches.Way` that follow from where rows are in memory."""

    grouped: bool
    skewed: bool
    ragged: bool
    vector: int


class Placed(NamedTuple):
    """Rows of logits (..., V) that one launch can address, and their gradient."""

    logits: Tensor
    grad: Tensor | None
    start: int
    """The first row, relative to the part's."""
    number: int
    """The number of rows."""
    rows: Strides
    """Of the logits."""
    places: Strides
    """Of the gradient."""
    skew: int
    """The offset of the first logit from a multiple of 16 bytes, in elements."""
    layout: Layout


def placed(block: Block) -> Iterator[Placed]:
    """Yield the rows of a block: all at once if a single launch can address them."""
    logits, grad = block.logits, block.grad
    if logits.dim() == 2 and logits.is_contiguous() and (grad is None or grad.is_contiguous()):
        (count, vocabulary), vector = logits.shape, 16 // logits.itemsize
        address = logits.data_ptr() if grad is None else logits.data_ptr() | grad.data_ptr()
        if address % 16 == vocabulary % vector == 0 and (grad is None or grad.dtype == logits.dtype):
            strides = count or 1, 0, vocabulary
            yield Placed(logits, grad, block.start, count, strides, strides, 0, Layout(False, False, False, vector))
            return
    pieces: Iterable[tuple[int, Tensor, Tensor | None]] = [(0, block.logits, block.grad)]
    if not _is_direct(block.logits) or (block.grad is not None and not _is_direct(block.grad)):
        pieces = logit_blocks(block.logits, block.grad)
    for start, logits, grad in pieces:
        written = logits if grad is None else grad
        rows, address = rows_of(logits), logits.data_ptr()
        places = rows if written is logits else rows_of(written)
        assert rows is not None
        assert places is not None
        count, vocabulary, vector = logits.shape[:-1].numel(), logits.shape[-1], 16 // logits.itemsize
        skew = address // logits.itemsize % vector
        skewed = (skew | rows[1] | rows[2]) % vector != 0
        ragged = skewed or vocabulary % vector != 0
        if skewed:  # each row of the gradient must have the same offset from a boundary as the row of logits
            alike = rows == places and logits.dtype == written.dtype and (written.data_ptr() - address) % 16 == 0
        else:
            alike = (written.data_ptr() | written.itemsize * (places[1] | places[2])) % 16 == 0
        if not alike or (ragged and not is_padded(logits)):
            skew, vector, skewed, ragged = 0, 1, False, True
        grouped = min(rows[0], places[0]) < count
        layout = Layout(grouped, skewed, ragged, vector)
        yield Placed(logits, grad, block.start + start, count, rows, places, skew, layout)


def _is_direct(tensor: Tensor) -> bool:
    """Return whether a kernel can address a tensor (..., V)."""
    return rows_of(tensor) is not None and (tensor.shape[-1] == 1 or tensor.stride(-1) == 1)


def rows_of(tensor: Tensor) -> Strides | None:
    """Return the strides of a (..., V) tensor; None if it has more than two strides of rows."""
    if tensor.dim() == 2:
        return tensor.shape[0] or 1, 0, tensor.stride(0)
    groups = [(1, tensor.shape[-1])]  # the stride that one row of a contiguous batch has
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        inner, outer_stride = groups[-1]
        if inner == 1 or outer_stride == size * stride:
            groups[-1] = inner * size, stride if size > 1 else outer_stride
        elif size > 1:
            groups.append((size, stride))
    if len(groups) > 2:
        return None
    return groups[-1][0], groups[0][1] if len(groups) == 2 else 0, groups[-1][1]


class Size(NamedTuple):
    """The sizes of a kernel for rows of up to `most` KiB."""

    most: float
    block: int
    """KiB of a block."""
    warps: int
    registers: int = 64
    programs: int = 1
    """The number of programs that share a row."""


_ANY = math.inf
_SIZES = {
    "read": (Size(_ANY, 16, 8),),
    "written": (Size(48, 16, 8), Size(200, 32, 8, 128), Size(_ANY, 64, 16, 128)),
    "written, shared": (
        *(Size(48, 16, 8), Size(176, 32, 8, 128)),
        *(Size(224, 16, 8, 64, 4), Size(400, 16, 8, 80, 4), Size(800, 32, 8, 128, 4), Size(_ANY, 32, 8, 128, 8)),
    ),
    "busy, written": (Size(48, 16, 8), Size(_ANY, 32, 16)),
    "busy, written, shared": (
        *(Size(48, 16, 8), Size(176, 32, 16)),
        *(Size(224, 16, 8, 64, 4), Size(400, 16, 8, 80, 4), Size(800, 32, 16, 64, 4), Size(_ANY, 32, 16, 64, 8)),
    ),
    "capped, written": (Size(_ANY, 8, 8),),
    "unaligned, read": (Size(16, 16, 16), Size(_ANY, 8, 8)),
    "unaligned, written": (Size(16, 16, 16), Size(88, 8, 8), Size(_ANY, 16, 16)),
    "unaligned, written, shared": (
        *(Size(16, 16, 16), Size(88, 8, 8), Size(120, 16, 16)),
        *(Size(400, 8, 8, 64, 4), Size(_ANY, 8, 8, 64, 8)),
    ),
}
"""The sizes for rows of more than 8 KiB, by what a kernel does and where rows begin, measured on an H200
(benchmarks/NOTES.md).

A second pass over a row, which writes the gradient, should find the row in the L1 or L2 cache. Short rows: several
programs run on a multiprocessor, each with its own row. Longer rows: one program per multiprocessor. Very long rows:
several programs share a row. Few warps with many registers are best: each warp computes a row's facts and coefficients
again. Busy kernels take many instructions for a class: they predict classes, or cap float32 logits. Without a second
pass, or with a softcap of 16-bit logits, rows are not shared, and four small programs per multiprocessor are best for
all rows."""

Sized = tuple[Way, int, dict[str, object]]
"""A way with block sizes, the number of classes of a program (the last one may have fewer), and launch options."""


def sizes(vocabulary: int, piece: Placed, way: Way, writes: bool, shares: bool, **more: bool) -> Sized:
    """Return the sizes of `rows_kernel` and `fold_kernel` for rows of `vocabulary` classes.

    `writes`: whether the kernel writes their gradient. `shares`: whether programs may share a row. They do not if
    logits and gradient are aligned differently. Rows of up to 8 KiB are one block, whose largest logit is the best
    reference of sums.
    """
    itemsize, vector = piece.logits.itemsize, piece.layout.vector
    row = vocabulary * itemsize / _KIB
    if row <= 8:
        block = next_power_of_2(vocabulary)
        return in_blocks(vocabulary, piece, way, block, max(min(block * itemsize // _KIB, 8), 1), **more)
    unaligned, shared = piece.layout.skewed or vector == 1, shares and vector > 1
    kind = "unaligned, " if unaligned else "busy, " if writes and (way.predicted or way.capped) else ""
    kind += ("written, shared" if shared else "written") if writes else "read"
    if way.capped and writes and itemsize == 2 and row > 16:
        kind = "capped, written"
    size = next(size for size in _SIZES[kind] if row <= size.most)
    return in_blocks(
        vocabulary, piece, way, size.block * _KIB // itemsize, size.warps, size.registers, size.programs, **more
    )


def in_blocks(
    vocabulary: int, piece: Placed, way: Way, block: int, warps: int, registers: int = 0, parts: int = 1, **more: bool
) -> Sized:
    """Return the sizes for rows in blocks of `block` classes, cut for `parts` programs at multiples of a cache line.

    Each part must have a class. If one part is longer than a block, all must be. `more` are other members of the way.
    """
    vector, skewed = piece.layout.vector, piece.layout.skewed
    # The reference of a skewed row is found without the last vector of its first block.
    block = max(block, 2 * vector)
    share = vocabulary if parts == 1 else cdiv(cdiv(vocabulary, parts), _LINE) * _LINE
    way = way._replace(
        block=block,
        blocks=next_power_of_2(cdiv(share, block)),
        parts=parts,
        **piece.layout._asdict(),
        **more,
    )
    # Without fused multiply-add if rows may begin anywhere: then a class may be in the first block, in the loop or in
    # the last block. The compiler may fuse one copy of the code and not another, and a row's bits would depend on where
    # it begins.
    options: dict[str, object] = {"num_warps": warps, "enable_fp_fusion": not skewed}
    return way, share, options | ({"maxnreg": registers} if registers else {})
