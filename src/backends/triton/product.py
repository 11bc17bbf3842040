"""Whether the product kernel serves a forward pass, and how it is launched."""

from typing import Any

from torch import Tensor

from xent.backends.triton.hopper import can_be_copied, descriptor, hopper_multiprocessors
from xent.backends.triton.launch import cdiv, launch
from xent.backends.triton.ring import LARGEST_SOFTCAP
from xent.backends.triton.tile_kernels import join_kernel

__all__ = [
    "BAND",
    "CLASSES",
    "DEPTH",
    "ENTRY_REGISTERS",
    "REGISTERS",
    "RELEASES",
    "WARPS",
    "can_be_summed",
    "launch_product",
    "serves",
]

RELEASES = ((3, 6), (3, 7))
BAND = 128  # rows of a tile
CLASSES = 256  # of a tile
DEPTH = 64  # columns of both factors in a slot: 128 bytes, which the copy engine can swizzle
_SUMMED = {"count", "lse", "nll", "z_loss"}  # statistics
_SLOTS = 4
WARPS = 4
ENTRY_REGISTERS = 168  # of each thread of three groups of four warps, before they are dealt out
REGISTERS = 240
_MOST_BANDS = 12  # side by side: their rows and the classes that other programs read with them stay in L2
_JOINED = 128  # rows


def serves(hidden: Tensor, classifier: Tensor, facts: Any) -> bool:
    """Whether it finds all results that are asked for from hidden (N, D) and classifier (V, D)."""
    if hidden.device.type != "cuda" or not hopper_multiprocessors(hidden.device.index, RELEASES):
        return False
    return can_be_summed(facts) and len(classifier) >= CLASSES and can_be_copied(hidden) and can_be_copied(classifier)


def launch_product(
    hidden: Tensor, classifier: Tensor, facts: Any, rounded: bool, peaks: Tensor, totals: Tensor
) -> None:
    """Write the largest x (N,) of each row without its target, and the sum of e^(x - largest).

    `rounded`: logits are rounded to their dtype first, as those are that another pass makes again.
    """
    programs = hopper_multiprocessors(hidden.device.index, RELEASES)
    start = 0
    for bands, group in _groups(cdiv(len(hidden), BAND), programs):
        rows = slice(start, min(start + bands * BAND, len(hidden)))
        _launch(
            programs, group, hidden[rows], classifier, facts, facts.target[rows], rounded, peaks[rows], totals[rows]
        )
        start = rows.stop


def _launch(
    programs: int,
    group: int,
    hidden: Tensor,
    classifier: Tensor,
    facts: Any,
    target: Tensor,
    rounded: bool,
    peaks: Tensor,
    totals: Tensor,
) -> None:
    from xent.backends.triton.product_kernel import product_kernel

    spec, (rows, width), vocabulary = facts.spec, hidden.shape, len(classifier)
    class_tiles = cdiv(vocabulary, CLASSES)
    parts = peaks.new_empty(2, min(programs // group, class_tiles), rows)
    launch(
        product_kernel,
        (programs,),
        descriptor(hidden, [BAND // 2, DEPTH]),
        descriptor(classifier, [CLASSES, DEPTH]),
        target,
        parts[0],
        parts[1],
        rows,
        vocabulary,
        cdiv(rows, BAND) * class_tiles,
        group,
        class_tiles,
        cdiv(width, DEPTH),
        spec.softcap or 0.0,
        spec.logit_scale,
        SLOTS=_SLOTS,
        SCALED=spec.logit_scale != 1,
        CAPPED=spec.softcap is not None,
        ROUNDED=rounded,
        REGISTERS=REGISTERS,
        num_warps=WARPS,
        maxnreg=ENTRY_REGISTERS,
    )
    launch(
        join_kernel,
        (cdiv(rows, _JOINED),),
        parts[0],
        parts[1],
        peaks,
        totals,
        rows,
        parts.shape[1],
        BLOCK=_JOINED,
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


def can_be_summed(facts: Any) -> bool:
    """Whether sums of exponentials, of logits that are in registers, are all that is asked for."""
    spec = facts.spec
    if spec.label_smoothing or facts.class_weight is not None or not _SUMMED.issuperset(spec.stats):
        return False
    return spec.softcap is None or spec.softcap <= LARGEST_SOFTCAP
