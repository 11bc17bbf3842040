"""Whether the ring kernel serves a call, how it is launched, and the rule by which its sizes are chosen."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

__all__ = ["Ring", "launch_ring", "ring_for"]

# Gluon, the language of that kernel, is not yet stable: these are the releases of Triton on which it was run.
_RELEASES = ((3, 6),)
_HOPPER = 9
_SMALLEST_ROW = 16384  # bytes; below, what a row costs whatever its length outweighs the gain
_LARGEST_SHORT_ROW = 80 * 1024  # bytes
_SPARE = 3 / 14  # of a ring's slots: what loads the next row during the reduction


@dataclass(frozen=True)
class Ring:
    """How to launch the ring kernel; programs are one or two a multiprocessor."""

    block: int
    """Elements a slot."""
    slots: int
    group: int
    """Programs a row."""
    warps: int
    programs: int
    """A multiprocessor."""
    registers: int
    shifted: bool
    """Rows do not start on 16-byte boundaries."""


@cache
def _multiprocessors(index: int) -> int:
    """Return how many a Hopper GPU has, 0 for another GPU or an untried Triton."""
    release = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
    device = torch.cuda.get_device_properties(index)
    return device.multi_processor_count if device.major == _HOPPER and release in _RELEASES else 0


def ring_for(logits: Tensor, grad: Tensor, facts: Any, results: Any) -> Ring | None:
    """Return how to launch the ring kernel for a block of rows, or None where plain Triton has to serve."""
    if logits.device.type != "cuda" or not _multiprocessors(logits.device.index):
        return None
    if facts.target is None or facts.class_weight is not None or not _has_results(results):
        return None
    spec, size = facts.spec, logits.itemsize
    if size == 4 and (spec.softcap is not None or spec.label_smoothing):
        return None  # exact enough for 16 bits only
    rows, vocabulary = logits.shape
    row, vector = vocabulary * size, 16 // size
    if row < _SMALLEST_ROW or logits.data_ptr() % 16 or grad.data_ptr() % 16:
        return None
    strides = logits.stride(0), grad.stride(0)
    shifted = any(length % vector for length in (vocabulary, *strides))
    if shifted and (strides[0] != strides[1] or rows * strides[0] >= 2**31 - 2**16):
        return None  # the copy engine counts elements in 32 bits
    if shifted:
        slot, slots, warps, programs, registers = 8192, 14, 8, 2, 80
    elif row <= _LARGEST_SHORT_ROW:
        slot, slots, warps, programs, registers = 8192, 28, 16, 1, 96
    else:
        slot, slots, warps, programs, registers = 16384, 14, 8, 1, 168
    group = triton.cdiv(triton.cdiv(row, slot), int(slots * (1 - _SPARE)))
    if group > _multiprocessors(logits.device.index):
        return None
    return Ring(slot // size, slots, group, warps, programs, registers, shifted)


def _has_results(results: Any) -> bool:
    """Whether the kernel finds all results that are asked for."""
    return results.norm is None and results.entropy is None and results.predictions is None


def launch_ring(
    ring: Ring, logits: Tensor, start: int, grad: Tensor, target_logits: Tensor | None, facts: Any, results: Any
) -> None:
    """Take rows [start, start + R): see `xent.backends.protocol.RowPass.forward`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from xent.backends.triton.ring_kernel import ring_kernel

    rows, vocabulary = logits.shape
    spec, size, part = facts.spec, logits.itemsize, slice(start, start + rows)
    smoothed = spec.label_smoothing != 0
    programs = _multiprocessors(logits.device.index) * ring.programs
    groups = min(rows, programs // ring.group)
    loss = results.loss[part]
    words = loss
    if ring.group > 1:
        words = loss.new_zeros(rows * ring.group * (2 if smoothed else 1) + 1, dtype=torch.int64)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * size, rank=2)
    if ring.shifted:
        elements, unit = (rows - 1) * logits.stride(0) + vocabulary, 1
        shape, strides = [1, elements], [triton.cdiv(elements, 16) * 16, 1]
    else:
        shape, strides, unit = [rows, vocabulary], [logits.stride(0), 1], 16 // size
    ring_kernel[(groups * ring.group,)](
        TensorDescriptor(logits, shape, strides, [1, ring.block], layout),
        logits,
        grad,
        facts.target[part],
        loss if target_logits is None else target_logits,
        facts.weight[part],
        facts.scale[part],
        facts.dead[part],
        loss,
        loss if results.lse is None else results.lse[part],
        loss if results.nll is None else results.nll[part],
        loss if results.z_term is None else results.z_term[part],
        words,
        rows,
        vocabulary // unit,
        logits.stride(0) // unit,
        grad.stride(0) // unit,
        1 - spec.label_smoothing,
        spec.label_smoothing / vocabulary,
        spec.z_loss,
        spec.softcap or 0.0,
        spec.logit_scale,
        BLOCK=ring.block,
        SLOTS=ring.slots,
        GROUP=ring.group,
        SHIFTED=ring.shifted,
        SCALED=spec.logit_scale != 1,
        CAPPED=spec.softcap is not None,
        Z_LOSS=spec.z_loss != 0,
        SMOOTHED=smoothed,
        EXACT_TARGETS=target_logits is not None,
        LSE=results.lse is not None,
        NLL=results.nll is not None,
        Z_TERM=results.z_term is not None,
        num_warps=ring.warps,
        maxnreg=ring.registers,
    )
