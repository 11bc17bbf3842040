"""Whether the ring kernel serves a call, how it is launched, and the rule by which its sizes are chosen."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.triton.hopper import hopper_multiprocessors
from xent.backends.triton.launch import cdiv, launch

__all__ = ["LARGEST_SOFTCAP", "RELEASES", "launch_ring", "programs_a_row"]

RELEASES = ((3, 6), (3, 7))
_SMALLEST_ROW = 84 * 1024  # bytes; of rows up to that, three fit into an L1 cache, where plain Triton finds them again
LARGEST_SOFTCAP = 256  # the kernel finds k tanh(v / k) to about k / 10^7: a softcap k that hardly bends would round x
_SLOT = 16384  # bytes
_SLOTS = 14
_SPARE = 3  # of the slots: what loads the next row during the reduction
_WARPS = 8
_REGISTERS = 168


def programs_a_row(logits: Tensor, grad: Tensor, facts: Any, results: Any) -> int | None:
    """Return how many programs of the ring kernel share a row of a block, or None where plain Triton has to serve."""
    if logits.device.type != "cuda" or not hopper_multiprocessors(logits.device.index, RELEASES):
        return None
    if facts.target is None or facts.class_weight is not None or not _has_results(results):
        return None
    spec, size, vocabulary = facts.spec, logits.itemsize, logits.shape[1]
    if size == 4 and (spec.softcap is not None or spec.label_smoothing):
        return None  # exact enough for 16 bits only
    if spec.softcap is not None and spec.softcap > LARGEST_SOFTCAP:
        return None
    if vocabulary * size <= _SMALLEST_ROW or logits.data_ptr() % 16 or grad.data_ptr() % 16:
        return None
    if any(length * size % 16 for length in (vocabulary, logits.stride(0), grad.stride(0))):
        return None  # rows do not begin on boundaries of 16 bytes, which the copy engine needs
    if logits.stride(0) < vocabulary:
        return None  # expanded rows or windows: the copy engine is not said to take rows that share memory
    group = cdiv(cdiv(vocabulary * size, _SLOT), _SLOTS - _SPARE)
    return group if group <= hopper_multiprocessors(logits.device.index, RELEASES) else None


def _has_results(results: Any) -> bool:
    """Whether the kernel finds all results that are asked for."""
    return results.norm is None and results.entropy is None and results.predictions is None


def launch_ring(
    group: int, logits: Tensor, start: int, grad: Tensor, target_logits: Tensor | None, facts: Any, results: Any
) -> None:
    """Take rows [start, start + R): see `xent.backends.protocol.RowPass.forward`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from xent.backends.triton.ring_kernel import ring_kernel

    rows, vocabulary = logits.shape
    spec, part, unit = facts.spec, slice(start, start + rows), 16 // logits.itemsize
    block = _SLOT // logits.itemsize
    smoothed = spec.label_smoothing != 0
    groups = min(rows, hopper_multiprocessors(logits.device.index, RELEASES) // group)
    loss = results.loss[part]
    words = loss
    if group > 1:
        words = loss.new_zeros(rows * group * (2 if smoothed else 1) + 1, dtype=torch.int64)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * logits.itemsize, rank=2)
    launch(
        ring_kernel,
        (groups * group,),
        TensorDescriptor(logits, [rows, vocabulary], [logits.stride(0), 1], [1, block], layout),
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
        BLOCK=block,
        SLOTS=_SLOTS,
        GROUP=group,
        SCALED=spec.logit_scale != 1,
        CAPPED=spec.softcap is not None,
        Z_LOSS=spec.z_loss != 0,
        SMOOTHED=smoothed,
        EXACT_TARGETS=target_logits is not None,
        LSE=results.lse is not None,
        NLL=results.nll is not None,
        Z_TERM=results.z_term is not None,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
    )
