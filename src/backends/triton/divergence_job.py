"""Divergences in Triton. The function is registered with the PyTorch driver, which has the loop over chunks of rows."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.divergence.call import Divergence
from xent.backends.torch.divergence.facts import RowFacts, TopK
from xent.backends.torch.divergence.steps import OVERLAYS, STEPS
from xent.backends.torch.private import storage_of
from xent.backends.triton.divergence_kernel import divergence_kernel
from xent.backends.triton.launch import launch, next_power_of_2
from xent.backends.triton.top_k_kernel import top_k_kernel
from xent.core.chunks import rows_per_block

__all__ = ["triton_rows"]

_BLOCK = 4096
_ELEMENTS_PER_WARP = 256


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
    if not len(z):
        return
    if not isinstance(teacher, TopK):
        _from_logits(call, z, teacher, facts, loss, grad, entropy)
    elif call.weight is not None:
        _from_top_k(call, z, teacher, facts, loss, grad, entropy)
    elif grad is not None:  # the kernel overwrites logits, and these are the caller's
        grad.copy_(z)
        _from_top_k(call, grad, teacher, facts, loss, grad, entropy)
    else:
        step = rows_per_block(z.shape[1], z.itemsize, z.device.type, 1)
        for start in range(0, len(z), step):
            rows = slice(start, start + step)
            surprise = None if entropy is None else entropy[rows]
            _from_top_k(call, z[rows].clone(), teacher.of(rows), facts.of(rows), loss[rows], None, surprise)


def _from_logits(
    call: Divergence,
    z: Tensor,
    teacher: Tensor,
    facts: RowFacts,
    loss: Tensor,
    grad: Tensor | None,
    entropy: Tensor | None,
) -> None:
    """Compute rows for a teacher's logits (R, V)."""
    teacher_cap = 0.0 if call.teacher_softcap is None else call.teacher_softcap
    exact = z.dtype == torch.float32
    constants = {
        "FORWARD": call.beta == 0,
        "REVERSE": call.beta == 1,
        "FROM_P": call.beta <= 0.5,
        "EXACT": exact,
        **_bent(call),
        "TEACHER_SCALED": call.teacher_scale != 1,
        "TEACHER_CAPPED": call.teacher_softcap is not None,
        "ALIGNED": _are_aligned(z, teacher, grad),
        "OVERLAID": _is_overlaid(z, grad),
    }
    numbers = (1.0 - call.beta, float(call.beta), *_numbers(call), call.teacher_scale, teacher_cap)
    matrices = (*_matrix(z), *_matrix(teacher), *_matrix(grad))
    # Without fused multiply-add, the code for one class (a reference) rounds like the code for all classes. So a
    # difference from the reference class is exactly 0 for that class.
    fusion: dict[str, int] = {"enable_fp_fusion": False} if exact else {}
    rows = _rows(facts, loss, entropy, z)
    launch(
        divergence_kernel,
        len(z),
        (*matrices, *rows, *numbers),
        constants | _block(z),
        **_warps(z),
        maxnreg=64,
        **fusion,
    )


def _from_top_k(
    call: Divergence,
    z: Tensor,
    teacher: TopK,
    facts: RowFacts,
    loss: Tensor,
    grad: Tensor | None,
    entropy: Tensor | None,
) -> None:
    """Compute rows for the teacher's K most probable classes. The logits at these are overwritten."""
    width = teacher.ids.shape[1]
    constants = {
        "BUCKET": call.tail == "bucket",
        "RENORMALIZED": call.tail == "renormalize",
        **_bent(call),
        "ALIGNED": _are_aligned(z, grad),
        "OVERLAID": _is_overlaid(z, grad),
        "WIDTH": next_power_of_2(width),
    }
    known = (teacher.ids.contiguous(), teacher.log_q.contiguous())
    numbers = (width, teacher.tolerance, *_numbers(call))
    matrices = (*_matrix(z), *known, *_matrix(grad))
    rows = _rows(facts, loss, entropy, z)
    launch(top_k_kernel, len(z), (*matrices, *rows, *numbers), constants | _block(z), **_warps(z))


def _bent(call: Divergence) -> dict[str, bool]:
    """Return the constants of the student's activation."""
    return {"SCALED": call.logit_scale != 1, "CAPPED": call.softcap is not None}


def _numbers(call: Divergence) -> tuple[float, float]:
    """Return the student's logit scale and softcap."""
    return call.logit_scale, 0.0 if call.softcap is None else call.softcap


def _rows(facts: RowFacts, loss: Tensor, entropy: Tensor | None, z: Tensor) -> tuple[Any, ...]:
    """Return the arguments of rows, and the number of classes."""
    idle = None if facts.idle is None else facts.idle.view(torch.uint8)
    dead = None if facts.dead is None or facts.dead is facts.idle else facts.dead.view(torch.uint8)
    return facts.weight, facts.scale, idle, dead, loss, entropy, z.shape[1]


def _block(z: Tensor) -> dict[str, int]:
    return {"BLOCK": min(next_power_of_2(z.shape[1]), _BLOCK)}


def _warps(z: Tensor) -> dict[str, int]:
    return {"num_warps": max(min(_block(z)["BLOCK"] // _ELEMENTS_PER_WARP, 16), 1)}


def _matrix(matrix: Tensor | None) -> tuple[Tensor | None, int]:
    """Return a matrix and the stride of its rows."""
    return matrix, 0 if matrix is None else matrix.stride(0)


def _are_aligned(*matrices: Tensor | None) -> bool:
    """Return whether all rows begin and end at multiples of 16 bytes, and have a multiple of 8 elements."""
    return all(
        matrix.shape[1] % 8 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0
        for matrix in matrices
        if matrix is not None
    )


def _is_overlaid(z: Tensor, grad: Tensor | None) -> bool:
    """Return whether the gradient is in the memory of logits of another dtype."""
    return grad is not None and grad.dtype != z.dtype and storage_of(grad) == storage_of(z)


STEPS["triton"] = triton_rows
OVERLAYS.add("triton")
