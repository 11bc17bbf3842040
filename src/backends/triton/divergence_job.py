"""Divergences in Triton. The function is registered with the PyTorch driver, which has the loop over chunks of rows."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.divergence.call import Divergence
from xent.backends.torch.divergence.facts import RowFacts, TopK
from xent.backends.torch.divergence.steps import STEPS
from xent.backends.triton.divergence_kernel import divergence_kernel
from xent.backends.triton.launch import cdiv, launch, next_power_of_2
from xent.backends.triton.top_k_kernel import top_k_kernel

__all__ = ["triton_rows"]

_BLOCK = 4096
_ELEMENTS_PER_WARP = 256
_BITS = 32


def triton_rows(
    call: Divergence,
    z: Tensor,
    teacher: Tensor | TopK,
    facts: RowFacts,
    loss: Tensor,
    grad: Tensor | None,
    entropy: Tensor | None,
) -> None:
    """See `xent.backends.torch.divergence.steps.Steps`."""
    count, vocabulary = z.shape
    if not count:
        return
    dead = None if facts.dead is None else facts.dead.view(torch.uint8)
    place = (None, 0) if grad is None else (grad, grad.stride(0))
    rows = (facts.weight, facts.scale, dead, loss, entropy, vocabulary)
    student_numbers = (call.logit_scale, 0.0 if call.softcap is None else call.softcap)
    student: dict[str, Any] = {"SCALED": call.logit_scale != 1, "CAPPED": call.softcap is not None}
    block = min(next_power_of_2(vocabulary), _BLOCK)
    warps = max(min(block // _ELEMENTS_PER_WARP, 16), 1)
    if isinstance(teacher, TopK):
        ids, log_q = teacher.ids.contiguous(), teacher.log_q.contiguous()
        bits = _bits(ids, log_q, vocabulary)
        known = (ids, log_q, bits, bits.shape[1])
        constants = {
            "BUCKET": call.tail == "bucket",
            "RENORMALIZED": call.tail == "renormalize",
            **student,
            "WIDTH": next_power_of_2(ids.shape[1]),
            "BLOCK": block,
        }
        numbers = (ids.shape[1], teacher.tolerance, *student_numbers)
        launch(top_k_kernel, count, (z, z.stride(0), *known, *place, *rows, *numbers), constants, num_warps=warps)
        return
    teacher_cap = 0.0 if call.teacher_softcap is None else call.teacher_softcap
    exact = z.dtype == torch.float32
    constants = {
        "FORWARD": call.beta == 0,
        "REVERSE": call.beta == 1,
        "FROM_P": call.beta <= 0.5,
        "EXACT": exact,
        **student,
        "TEACHER_SCALED": call.teacher_scale != 1,
        "TEACHER_CAPPED": call.teacher_softcap is not None,
        "ALIGNED": all(_is_aligned(matrix) for matrix in (z, teacher, grad) if matrix is not None),
        "BLOCK": block,
    }
    weights = (1.0 - call.beta, float(call.beta), *student_numbers, call.teacher_scale, teacher_cap)
    sides = (z, z.stride(0), teacher, teacher.stride(0))
    # Without fused multiply-add, the code for one class (a reference) rounds like the code for all classes. So a
    # difference from the reference class is exactly 0 for that class.
    fusion: dict[str, int] = {"enable_fp_fusion": False} if exact else {}
    launch(
        divergence_kernel, count, (*sides, *place, *rows, *weights), constants, num_warps=warps, maxnreg=64, **fusion
    )


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether all rows begin and end at multiples of 16 bytes, and have a multiple of 8 elements."""
    pitch = matrix.stride(0) * matrix.itemsize
    return matrix.shape[1] % 8 == 0 and pitch % 16 == 0 and matrix.data_ptr() % 16 == 0


def _bits(ids: Tensor, log_q: Tensor, vocabulary: int) -> Tensor:
    """Return a bitmap (R, words) int32 of each row's classes: 1 if the class is among the row's ids."""
    known = (log_q != -torch.inf) & (ids >= 0) & (ids < vocabulary)
    safe = ids.masked_fill(~known, 0)
    ones = torch.where(known, torch.bitwise_left_shift(torch.ones_like(safe), safe % _BITS), 0)
    signed = torch.where(ones >= 2 ** (_BITS - 1), ones - 2**_BITS, ones).to(torch.int32)
    words = torch.zeros(len(ids), cdiv(vocabulary, _BITS), dtype=torch.int32, device=ids.device)
    # The ids of a row are distinct, so the sum of their bits is the union.
    return words.scatter_add_(1, safe // _BITS, signed)


STEPS["triton"] = triton_rows
