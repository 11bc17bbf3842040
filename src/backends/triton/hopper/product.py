"""The two matrix products for Hopper GPUs: the calls that they support, and their launches.

`fold_product` computes the sums of rows, `gradient_product` the gradients of their logits. Neither stores logits. They
support no bias and no per-row temperature.
"""

from typing import Any

from torch import Tensor

from xent.backends.triton.hopper.door import can_be_copied, copyable, descriptor, hopper_multiprocessors
from xent.backends.triton.launch import cdiv, launch
from xent.backends.triton.tile_kernels import join_kernel
from xent.core.spec import LossSpec

__all__ = ["LARGEST_SOFTCAP", "fold_product", "gradient_product", "serves"]

LARGEST_SOFTCAP = 256  # the kernels compute k tanh(v / k) with an error of about k / 10^7, too much if k is large
_BAND = 128  # rows of a tile
_CLASSES = 256  # classes of a tile
_DEPTH = 64  # width of a slice of both factors: 128 bytes, which the copy engine can swizzle
_SLOTS = 4
_WARPS = 4
_ENTRY_REGISTERS = 168  # registers per thread at entry, for three groups of four warps, before they are redistributed
_REGISTERS = 240
_GROUP = 12  # bands computed at the same time, so that their rows and the classes that they share stay in the L2 cache
_MOST_CHUNKS = 320  # chunks of the vocabulary, each with its own sums
_SUMS_BYTES = 32 * 2**20  # bytes of the sums of all chunks in a launch
_JOINED = 32  # rows of a program of `join_kernel`


def serves(classifier: Tensor, spec: LossSpec) -> bool:
    """Return whether the kernels serve a classifier (V, D), with hidden states (N, D) of its dtype and any strides."""
    if classifier.device.type != "cuda" or not hopper_multiprocessors(classifier.device.index):
        return False
    if (spec.softcap is not None and spec.softcap > LARGEST_SOFTCAP) or len(classifier) < _CLASSES:
        return False
    # Hidden states may be copied to contiguous memory. Then their rows are D elements apart.
    return can_be_copied(classifier) and classifier.shape[1] * classifier.itemsize % 16 == 0


def fold_product(
    hidden: Tensor,
    classifier: Tensor,
    spec: LossSpec,
    classes: Tensor,
    peaks: Tensor,
    totals: Tensor,
    mixed: Tensor | None,
    workspace: int | None,
) -> None:
    """Write each row's largest x, the sum of e = e^(x - largest), and the sum of e log e, (N,) each.

    They exclude the target, `classes` (N,) int32. `mixed`, for the sum of e log e, may be None. Logits stay in
    registers in float32. A row's bits do not depend on the other rows.
    """
    hidden, (count, _) = copyable(hidden), hidden.shape
    chunks = _walk(count, classifier)[2]
    size = chunks * 4 * (2 if mixed is None else 3)
    step = max(min(workspace or _SUMS_BYTES, _SUMS_BYTES) // size // _BAND, _GROUP) * _BAND
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        of_rows = None if mixed is None else mixed[rows]
        _fold(hidden[rows], classifier, spec, classes[rows], peaks[rows], totals[rows], of_rows)


def _fold(
    hidden: Tensor,
    classifier: Tensor,
    spec: LossSpec,
    classes: Tensor,
    peaks: Tensor,
    totals: Tensor,
    mixed: Tensor | None,
) -> None:
    from xent.backends.triton.hopper.product_kernel import product_kernel

    rows, walk = len(hidden), _walk(len(hidden), classifier)
    parts = peaks.new_empty(2 if mixed is None else 3, walk[2], rows)
    launch(
        product_kernel,
        hopper_multiprocessors(hidden.device.index),
        (
            *_factors(hidden, classifier),
            classes,
            parts[0],
            parts[1],
            parts[-1],
            rows,
            len(classifier),
            *walk,
            *_numbers(spec),
        ),
        {**_constants(spec), "ENTROPY": mixed is not None, "REGISTERS": _REGISTERS},
        num_warps=_WARPS,
        maxnreg=_ENTRY_REGISTERS,
    )
    launch(
        join_kernel,
        cdiv(rows, _JOINED),
        (parts[0], parts[1], None if mixed is None else parts[2], peaks, totals, mixed, rows, walk[2]),
        {"BLOCK": _JOINED, "PARTS": 32},
        num_warps=4,
    )


def gradient_product(
    hidden: Tensor,
    classifier: Tensor,
    spec: LossSpec,
    classes: Tensor,
    coefficients: Tensor,
    grad: Tensor,
    tilted: bool,
) -> None:
    """Write the gradient (R, 8n) of the logits of hidden states (R, D); 0 in columns beyond the vocabulary.

    `classes` (R,) int32 and `coefficients` (4, R) are the outputs of `coefficients_kernel`.
    """
    from xent.backends.triton.hopper.gradient_product_kernel import gradient_product_kernel

    launch(
        gradient_product_kernel,
        hopper_multiprocessors(hidden.device.index),
        (
            *_factors(copyable(hidden), copyable(classifier)),
            classes,
            coefficients,
            grad,
            len(hidden),
            len(classifier),
            grad.stride(0) // 8,
            *_walk(len(hidden), classifier),
            *_numbers(spec),
        ),
        {**_constants(spec), "TILTED": tilted, "REGISTERS": _REGISTERS},
        num_warps=_WARPS,
        maxnreg=_ENTRY_REGISTERS,
    )


def _walk(rows: int, classifier: Tensor) -> tuple[int, int, int, int, int, int]:
    """Return (units, group, chunks, tiles per chunk, tiles per row, slices of the width).

    The chunks depend on the vocabulary only.
    """
    vocabulary, width = classifier.shape
    tiles = cdiv(vocabulary, _CLASSES)
    of_chunk = cdiv(tiles, _MOST_CHUNKS)
    chunks = cdiv(tiles, of_chunk)
    return cdiv(rows, _BAND) * chunks, _GROUP, chunks, of_chunk, tiles, cdiv(width, _DEPTH)


def _factors(hidden: Tensor, classifier: Tensor) -> tuple[Any, Any]:
    return descriptor(hidden, [_BAND // 2, _DEPTH]), descriptor(classifier, [_CLASSES, _DEPTH])


def _numbers(spec: LossSpec) -> tuple[float, float]:
    return float(spec.softcap or 0), float(spec.logit_scale)


def _constants(spec: LossSpec) -> dict[str, Any]:
    return {"SLOTS": _SLOTS, "SCALED": spec.logit_scale != 1, "CAPPED": spec.softcap is not None}
