"""The matrix product for Hopper GPUs: the calls that it serves, and its launches. It never stores logits.

It serves target classes without label smoothing, without bias, temperatures per row, and options that are tensors.

Gluon, Triton's lower-level language, is not stable. A variant of the kernel is on where it compiles and agrees with
PyTorch on a small product, which is computed once per process, before the first launch of the variant. This never
happens while a CUDA graph is captured: if nothing ran before, the variant stays off, so that the results of a process
do not change.
"""

import math
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.contract import Loaded, wide
from xent.backends.torch.products import Classifier
from xent.backends.torch.sources import fold_tiles
from xent.backends.triton.kernels.sums import join_kernel
from xent.backends.triton.launches import Numbers, cdiv, launch
from xent.backends.triton.machine import DEVICES, multiprocessors
from xent.core.call import Classes

__all__ = ["Variant", "fold_product", "gradient_product", "off", "product"]

_BAND = 128  # rows of a tile
_CLASSES = 256  # classes of a tile
_DEPTH = 64  # width of a slice of both factors: 128 bytes, which the copy engine can swizzle
_GROUP = 12  # bands, see `product_kernel`
_MOST_CHUNKS = 320  # chunks of the vocabulary, each with its own sums
_LARGEST_SOFTCAP = 256  # the kernel computes k tanh(v / k) with an error of about k / 10^7, too much if k is large
_SUMS_BYTES = 32 * 2**20  # bytes of the sums of all chunks in a launch
_JOINED = 32  # rows of a program of `join_kernel`
_HOPPER = 9


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: torch.dtype = torch.bfloat16
    capped: bool = False
    """Whether there is a softcap."""
    entropy: bool = False
    """Whether the call returns the entropy. Its backward pass then takes this variant without a gradient of it too."""
    writes: bool = False
    """Whether the kernel writes the gradient instead of sums."""


_PLAIN = Variant()
_reasons: dict[Variant, str | None] = {}  # why a variant is off, None if it is on; empty before its probe


def product(
    variant: Variant,
    numbers: Numbers,
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    coefficients: Tensor | None,
    out: Tensor,
) -> None:
    """Write sums, or with `coefficients` the gradient of the logits, of hidden states (R, D) to `out`.

    See `product_kernel`. `numbers` have logit scale and softcap. `classes` (R,) int32.
    """
    from xent.backends.triton.hopper.product_kernel import product_kernel

    hidden = hidden if _can_be_copied(hidden) else hidden.clone(memory_format=torch.contiguous_format)
    factors = _descriptor(hidden, _BAND // 2), _descriptor(weight, _CLASSES)
    coefficients = out if coefficients is None else coefficients
    sizes = len(hidden), len(weight), _chunks(len(weight)), out.stride(0) // 8, cdiv(weight.shape[1], _DEPTH)
    launch(
        product_kernel,
        multiprocessors(hidden.device),
        (*factors, classes, coefficients, out, *sizes, numbers.logit_scale, numbers.softcap),
        {"CAPPED": variant.capped, "WRITES": variant.writes, "MORE": variant.entropy},
        num_warps=4,
        maxnreg=168,  # at entry, for three groups of four warps, before the registers are redistributed
    )


def _chunks(vocabulary: int) -> int:
    tiles = cdiv(vocabulary, _CLASSES)
    return cdiv(tiles, cdiv(tiles, _MOST_CHUNKS))


def _can_be_copied(matrix: Tensor) -> bool:
    """Return whether the copy engine supports a matrix: 16-bit elements, rows at multiples of 16 bytes, no overlap."""
    if matrix.dtype not in (torch.bfloat16, torch.float16):
        return False
    pitch, width = matrix.stride(0), matrix.shape[1]
    aligned = matrix.stride(1) == 1 and pitch * matrix.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0
    return aligned and 0 < width <= pitch


def _descriptor(matrix: Tensor, rows: int) -> object:
    """Return the copy engine's descriptor of a matrix. Rows of a block are swizzled by 128 bytes in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, _DEPTH], layout)


def _variant(inputs: Any, source: Classifier, writes: bool) -> Variant | None:
    """Return the variant that serves a call, with hidden states of any strides; None if the kernel does not."""
    weight = source.weight
    if not isinstance(inputs.setting.call.target, Classes) or inputs.way.smoothed or source.bias is not None:
        return None
    if not inputs.knows_activation or inputs.numbers.softcap > _LARGEST_SOFTCAP:
        return None
    # Hidden states may be copied to contiguous memory. Then their rows are D elements apart.
    if len(weight) < _CLASSES or not _can_be_copied(weight) or weight.shape[1] * weight.itemsize % 16:
        return None
    variant = Variant(weight.dtype, inputs.way.capped, inputs.columns.mixed >= 0, writes)
    return variant if off(weight.device, variant) is None else None


def fold_product(steps: Any, source: Classifier, loaded: Loaded, sums: Tensor) -> bool:
    """See `xent.backends.torch.contract.Steps.fold_product`. A row's bits do not depend on the other rows.

    An exact call has the same bits whatever statistics it returns: sums that the product lacks take a second pass over
    tiles. Other calls then take all sums from tiles. `steps` are `xent.backends.triton.steps.TritonSteps`.
    """
    inputs, setting, weight, part = steps.inputs, steps.setting, source.weight, loaded.part
    columns, of_targets = inputs.columns, loaded.target_logits
    lacks = max(columns.squares, columns.deficit, columns.key) >= 0
    if of_targets is None or (lacks and not setting.call.options.exact):
        return False
    variant = _variant(inputs, source, False)
    if variant is None:
        return False
    workspace = setting.call.source.workspace
    if lacks:
        fold_tiles(steps, source, loaded, sums, wide(source.compute), workspace)
    hidden, classes = loaded.hidden, (inputs.rows.target[part.indices] - setting.first).to(torch.int32)
    kinds, chunks = 3 if columns.mixed >= 0 else 2, _chunks(len(weight))
    bytes_of_row = 4 * kinds * chunks
    step = max(min(workspace or _SUMS_BYTES, _SUMS_BYTES) // bytes_of_row // _BAND, _GROUP) * _BAND
    for start in range(0, len(hidden), step):
        row_slice = slice(start, start + step)
        count = len(classes[row_slice])
        partial_sums = hidden.new_empty(kinds, chunks, count, dtype=torch.float32)
        product(variant, inputs.numbers, hidden[row_slice], weight, classes[row_slice], None, partial_sums)
        rows, first, _ = inputs.rows_of(part, start)
        launch(
            join_kernel,
            cdiv(count, _JOINED),
            (
                *(partial_sums, chunks, count, sums[:, row_slice], sums.stride(0), of_targets[row_slice], rows, first),
                *(inputs.ignore_index, setting.first, setting.width, setting.vocabulary),
            ),
            {"columns": columns, "BLOCK": _JOINED, "PARTS": 32},
            num_warps=4,
        )
        del partial_sums  # before the memory of the next sums is allocated
    return True


def gradient_product(steps: Any, source: Classifier, loaded: Loaded, coefficients: Tensor, grad: Tensor) -> bool:
    """See `xent.backends.torch.contract.Steps.gradient_product`. `coefficients` (6, R) are those of `finish_kernel`."""
    inputs = steps.inputs
    if grad.dtype != source.compute or grad.data_ptr() % 16 or grad.stride(0) % 8:
        return False
    variant = _variant(inputs, source, True)
    if variant is None:
        return False
    classes = coefficients[5].view(torch.int32)
    product(variant, inputs.numbers, loaded.hidden, source.weight, classes, coefficients, grad)
    return True


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == _HOPPER


def off(device: torch.device, variant: Variant = _PLAIN) -> str | None:
    """Return the reason why a variant of the kernel is not used on a device; None if it is."""
    if device.type != "cuda" or DEVICES != ("cuda",):
        return "no GPU"
    if not _is_hopper(device):
        return "the GPU is no Hopper"
    if os.environ.get("XENT_PORTABLE") == "1":
        return "XENT_PORTABLE=1"
    if variant not in _reasons:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            _reasons[variant] = "the first call of the process was captured in a CUDA graph"
        else:
            try:
                _reasons[variant] = _probe(device, variant)
            except Exception as error:  # Triton raises many kinds
                _reasons[variant] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return _reasons[variant]


def _probe(device: torch.device, variant: Variant) -> str | None:
    """Return None if a launch on a small product, with partial tiles, agrees with PyTorch's operations."""
    rows, vocabulary, scale, cap = 200, 603, 0.7, 4.0
    numbers = torch.arange(vocabulary * 136, device=device, dtype=torch.float32)
    weight = numbers.sin().view(vocabulary, 136).to(variant.dtype)
    hidden = (0.3 * numbers).cos().view(vocabulary, 136)[:rows].to(variant.dtype)
    x, slope = scale * (hidden.float() @ weight.float().t()), torch.full((), scale, device=device)
    if variant.capped:
        x = cap * (x / cap).tanh()
        slope = scale * (1 - (x / cap).square())
    classes = 3 * torch.arange(rows, device=device, dtype=torch.int32)
    targets = torch.nn.functional.one_hot(classes.long(), vocabulary).bool()
    activation = Numbers(1.0, 0.0, 0.0, cap, scale)
    if variant.writes:
        classes[-1] = -2
        top = x.amax(-1)
        # The coefficients of probabilities, with the gradient of an entropy, and of targets.
        factor = 1 / (x - top[:, None]).exp().sum(-1)
        log_factor = 0.3 * factor if variant.entropy else torch.zeros_like(factor)
        grad = torch.empty(rows, cdiv(vocabulary, 8) * 8, dtype=variant.dtype, device=device)
        coefficients = torch.stack((top, factor, -1 - factor, log_factor))
        product(variant, activation, hidden, weight, classes, coefficients, grad)
        apart = x - top[:, None]
        expected = apart.exp() * (factor[:, None] + log_factor[:, None] / math.log(2) * apart) * slope
        expected = torch.where(targets, -1 - factor[:, None], expected)
        expected[-1] = 0
        # The gradients of targets are much larger than those of other classes.
        own = grad[:, :vocabulary].float()
        pairs = [(torch.where(part, own, 0), torch.where(part, expected, 0), 1e-2) for part in (targets, ~targets)]
        pairs.append((grad[:, vocabulary:].float(), torch.zeros(rows, 5, device=device), 0.0))
    else:
        classes[-1], targets[-1] = -1, False  # a row without a target
        chunks, kinds = _chunks(vocabulary), 3 if variant.entropy else 2
        sums = torch.empty(kinds, chunks, rows, dtype=torch.float32, device=device)
        product(variant, activation, hidden, weight, classes, None, sums)
        others = x.masked_fill(targets, -math.inf)
        parts = torch.nn.functional.pad(others, (0, chunks * _CLASSES - vocabulary), value=-math.inf)
        parts = parts.view(rows, chunks, _CLASSES)
        top = parts.amax(-1)
        apart = parts - top[:, :, None]
        mixed = torch.where(apart == -math.inf, 0, apart.exp() * apart).sum(-1) / math.log(2)
        expected = torch.stack((top, apart.exp().sum(-1), mixed)).transpose(1, 2)
        pairs = [(own, right, 1e-4) for own, right in zip(sums, expected, strict=False)]
    agree = all(bool(((own - right).abs() <= close * right.abs().max()).all()) for own, right, close in pairs)
    return None if agree else "its results differ from PyTorch's"
