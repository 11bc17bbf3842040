"""Whether the product kernel serves a forward pass, and how it is launched.

It has no entropy and no temperature of each row. Exact calls, whose bits are the same with and without the entropy, do
not take it (`xent.backends.triton.tiles`).
"""

from torch import Tensor

from xent.backends.triton.hopper.door import can_be_copied, copyable, descriptor, hopper_multiprocessors
from xent.backends.triton.launch import cdiv, launch
from xent.backends.triton.tile_kernels import join_kernel
from xent.core.spec import LossSpec

__all__ = ["LARGEST_SOFTCAP", "fold_product"]

LARGEST_SOFTCAP = 256  # the kernel finds k tanh(v / k) to about k / 10^7: a softcap k that hardly bends would round x
_BAND = 128  # rows of a tile
_CLASSES = 256  # of a tile
_DEPTH = 64  # columns of both factors in a slot: 128 bytes, which the copy engine can swizzle
_SLOTS = 4
_WARPS = 4
_ENTRY_REGISTERS = 168  # of each thread of three groups of four warps, before they are dealt out
_REGISTERS = 240
_MOST_BANDS = 12  # side by side: their rows and the classes that other programs read with them stay in L2
_JOINED = 128  # rows


def fold_product(
    hidden: Tensor, classifier: Tensor, spec: LossSpec, classes: Tensor, peaks: Tensor, totals: Tensor
) -> bool:
    """Write the largest x (N,) of each row without its target, and the sum of e^(x - largest); False if not served.

    Takes hidden (N, D), classifier (V, D) and the targets, `classes` (N,) int32. No logit is rounded or stored.
    """
    if hidden.device.type != "cuda" or not hopper_multiprocessors(hidden.device.index):
        return False
    if (spec.softcap is not None and spec.softcap > LARGEST_SOFTCAP) or len(classifier) < _CLASSES:
        return False
    hidden = copyable(hidden)
    if not (can_be_copied(hidden) and can_be_copied(classifier)):
        return False
    programs = hopper_multiprocessors(hidden.device.index)
    start = 0
    for bands, group in _groups(cdiv(len(hidden), _BAND), programs):
        rows = slice(start, min(start + bands * _BAND, len(hidden)))
        _launch(programs, group, hidden[rows], classifier, spec, classes[rows], peaks[rows], totals[rows])
        start = rows.stop
    return True


def _launch(
    programs: int,
    group: int,
    hidden: Tensor,
    classifier: Tensor,
    spec: LossSpec,
    target: Tensor,
    peaks: Tensor,
    totals: Tensor,
) -> None:
    from xent.backends.triton.hopper.product_kernel import product_kernel

    (rows, width), vocabulary = hidden.shape, len(classifier)
    class_tiles = cdiv(vocabulary, _CLASSES)
    parts = peaks.new_empty(2, min(programs // group, class_tiles), rows)
    launch(
        product_kernel,
        programs,
        (
            descriptor(hidden, [_BAND // 2, _DEPTH]),
            descriptor(classifier, [_CLASSES, _DEPTH]),
            target,
            parts[0],
            parts[1],
            rows,
            vocabulary,
            cdiv(rows, _BAND) * class_tiles,
            group,
            class_tiles,
            cdiv(width, _DEPTH),
            float(spec.softcap or 0),
            float(spec.logit_scale),  # an integer would be another type
        ),
        {
            "SLOTS": _SLOTS,
            "SCALED": spec.logit_scale != 1,
            "CAPPED": spec.softcap is not None,
            "REGISTERS": _REGISTERS,
        },
        num_warps=_WARPS,
        maxnreg=_ENTRY_REGISTERS,
    )
    launch(
        join_kernel,
        cdiv(rows, _JOINED),
        (parts[0], parts[1], peaks, totals, rows, parts.shape[1]),
        {"BLOCK": _JOINED},
        num_warps=_JOINED // 32,
    )


def _groups(bands: int, programs: int) -> list[tuple[int, int]]:
    """Return (bands, group) of each launch: groups divide the programs, and the bands of a launch are whole groups."""
    found = []
    while bands:
        group = max(size for size in range(1, min(bands, _MOST_BANDS) + 1) if programs % size == 0)
        found.append((bands // group * group, group))
        bands %= group
    return found
