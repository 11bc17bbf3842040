"""The memory layout of rows, and the vector size, block size and warps that kernels of whole rows use for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xent.backends.torch.contract import Block
from xent.backends.torch.devices import is_padded
from xent.backends.torch.memory import logit_blocks
from xent.backends.triton.launches import Way, cdiv, next_power_of_2

__all__ = ["Placed", "in_blocks", "placed", "rows_of", "sizes"]

_KIB = 1024
_LINE = 64  # classes: a cache line of 16-bit logits, two of float32 logits

Strides = tuple[int, int, int]
"""(rows in a group, stride of groups, stride of rows), in elements. The stride of groups may be 0."""


@dataclass(eq=False, slots=True)
class Placed:
    """Rows of logits (..., V) that one launch can address, and their gradient."""

    logits: Tensor
    grad: Tensor | None
    start: int
    """The first row, relative to the part's."""
    rows: Strides
    """Of the logits."""
    places: Strides
    """Of the gradient."""
    skew: int
    """The offset of the first logit from a multiple of 16 bytes, in elements."""
    vector: int
    """Elements that one load reads (16 bytes); 1 if rows of logits and gradient are aligned differently."""
    skewed: bool
    """Whether rows may begin at other addresses than multiples of 16 bytes."""
    ragged: bool
    """Whether rows may begin or end at other addresses than multiples of 16 bytes."""

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.logits.shape[:-1].numel()

    @property
    def memory(self) -> tuple[Any, ...]:
        """The kernel arguments for logits and gradient."""
        return self.logits, *self.rows, self.skew, self.grad, *self.places

    def constants(self) -> dict[str, Any]:
        """Return members of `xent.backends.triton.launches.Way`."""
        grouped = min(self.rows[0], self.places[0]) < self.count
        return {"grouped": grouped, "skewed": self.skewed, "ragged": self.ragged, "vector": self.vector}

    def options(self) -> dict[str, bool]:
        """Return launch options: no fused multiply-add if rows may begin anywhere.

        Then a class may be in the first block, in the loop or in the last block. These are copies of the same code, and
        the compiler may fuse one copy and not another. A row's bits would depend on where it begins.
        """
        return {"enable_fp_fusion": not self.skewed}


def placed(block: Block) -> Iterator[Placed]:
    """Yield the rows of a block: all at once if a single launch can address them."""
    found = _placed(block.logits, block.grad, block.start)
    if found is not None:
        yield found
        return
    for start, logits, grad in logit_blocks(block.logits, block.grad):
        found = _placed(logits, grad, block.start + start)
        assert found is not None
        yield found


def rows_of(tensor: Tensor) -> Strides | None:
    """Return the strides of a (..., V) tensor; None if it has more than two strides of rows."""
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


def _placed(logits: Tensor, grad: Tensor | None, start: int) -> Placed | None:
    """Return where logits (..., V) and their gradient are; None if a kernel cannot address them."""
    made = logits if grad is None else grad
    rows, places, vocabulary = rows_of(logits), rows_of(made), logits.shape[-1]
    if rows is None or places is None or (vocabulary > 1 and (logits.stride(-1) != 1 or made.stride(-1) != 1)):
        return None
    vector = 16 // logits.itemsize
    skew = logits.data_ptr() // logits.itemsize % vector
    skewed = skew != 0 or rows[1] % vector != 0 or rows[2] % vector != 0
    ragged = skewed or vocabulary % vector != 0
    if skewed:  # each row of the gradient must have the same offset from a boundary as the row of logits
        alike = rows == places and logits.dtype == made.dtype and (made.data_ptr() - logits.data_ptr()) % 16 == 0
    else:
        alike = not any(place % 16 for place in (made.data_ptr(), *(made.itemsize * step for step in places[1:])))
    if not alike or (ragged and not is_padded(logits)):
        return Placed(logits, grad, start, rows, places, 0, 1, False, True)
    return Placed(logits, grad, start, rows, places, skew, vector, skewed, ragged)


Sized = tuple[Way, int, dict[str, Any]]
"""A way with block sizes, the number of classes of a program (the last one may have fewer), and launch options."""


def sizes(vocabulary: int, some: Placed, way: Way, writes: bool, shares: bool) -> Sized:
    """Return the sizes of `rows_kernel` and `fold_kernel` for rows of `vocabulary` classes.

    `writes`: whether the kernel writes their gradient. `shares`: whether programs may share a row. They do not if
    logits and gradient are aligned differently. To predict classes or to cap logits takes many instructions.

    A second pass over a row, which writes the gradient, should find the row in the L1 or L2 cache. Short rows: several
    programs run on a multiprocessor, each with its own row. Longer rows: one program per multiprocessor. Rows of more
    than 176 KiB, unaligned ones of more than 120 KiB: several programs share a row. Few warps with many registers are
    best: each warp computes a row's facts and coefficients again. Without a second pass, or with a softcap of 16-bit
    logits, rows are not shared, and four small programs per multiprocessor are best for all rows.
    Measured on an H200 (benchmarks/NOTES.md). Rows of up to 16 KiB are one block, whose largest logit is the best
    reference of sums.
    """
    itemsize, parts = some.logits.itemsize, 1
    row, is_odd = vocabulary * itemsize, some.skewed or some.vector == 1
    if row <= 8 * _KIB:
        block, warps, registers = next_power_of_2(vocabulary), 0, 0
    elif way.capped and writes and itemsize == 2 and row > 16 * _KIB:
        block, warps, registers = 8 * _KIB // itemsize, 8, 64
    elif shares and writes and some.vector > 1 and row > (120 if is_odd else 176) * _KIB:
        parts, block, warps, registers = _shared(row, itemsize, is_odd, way.predicted)
    elif is_odd and (row <= 16 * _KIB or (writes and row > 88 * _KIB)):
        block, warps, registers = 16 * _KIB // itemsize, 16, 64
    elif not writes or is_odd or row <= 48 * _KIB:
        block, warps, registers = (8 if is_odd else 16) * _KIB // itemsize, 8, 64
    elif way.predicted or way.capped:
        block, warps, registers = 32 * _KIB // itemsize, 16, 64
    elif row <= 200 * _KIB:
        block, warps, registers = 32 * _KIB // itemsize, 8, 128
    else:
        block, warps, registers = 64 * _KIB // itemsize, 16, 128
    # A block has at least two vectors: the reference of a skewed row is found without the last vector of its first
    # block.
    block = max(block, 2 * some.vector)
    warps = warps or max(min(block * itemsize // _KIB, 8), 1)
    return in_blocks(vocabulary, some, way, block, warps, registers, parts)


def in_blocks(
    vocabulary: int, some: Placed, way: Way, block: int, warps: int, registers: int = 0, parts: int = 1
) -> Sized:
    """Return the sizes for rows in blocks of `block` classes, cut for `parts` programs at multiples of a cache line.

    Each part must have a class. If one part is longer than a block, all must be.
    """
    lanes = block if some.skewed or some.vector == 1 else block // some.vector
    share = vocabulary if parts == 1 else cdiv(cdiv(vocabulary, parts), _LINE) * _LINE
    blocks = next_power_of_2(cdiv(share, block))
    way = way._replace(block=block, lanes=lanes, blocks=blocks, parts=parts, **some.constants())
    limit = {"maxnreg": registers} if registers else {}
    return way, share, {"num_warps": warps, **limit, **some.options()}


def _shared(row: int, itemsize: int, is_odd: bool, predicts: bool) -> tuple[int, int, int, int]:
    """Return programs, block, warps and registers for rows of so many bytes that several programs share."""
    if is_odd:
        return 4 if row <= 400 * _KIB else 8, 8 * _KIB // itemsize, 8, 64
    if row <= 400 * _KIB:
        return 4, 16 * _KIB // itemsize, 8, 64 if row <= 224 * _KIB else 80
    return 4 if row <= 800 * _KIB else 8, 32 * _KIB // itemsize, *((16, 64) if predicts else (8, 128))
