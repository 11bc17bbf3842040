"""The steps around the row kernel, a launch each: the sum of the rows' losses, target logits, the upstream factor."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xent.backends.torch import steps as plain
from xent.backends.torch.facts import Facts
from xent.backends.torch.rows import is_dense
from xent.backends.triton.launch import cdiv, launch, next_power_of_2
from xent.backends.triton.machine import multiprocessors

__all__ = ["reduced", "scale_", "target_logits"]


@triton.jit(do_not_specialize=["count"])
def _sum_kernel(values, divisor, total, count, BLOCK: tl.constexpr):
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        sums += tl.load(values + rows, mask=rows < count, other=0.0)
    found = tl.sum(sums, 0)
    if divisor is not None:
        d = tl.load(divisor)
        found = tl.where(d == 0, 0.0, tl.div_rn(found, tl.where(d == 0, 1.0, d)))
    tl.store(total, found)


def reduced(values: Tensor, facts: Facts) -> Tensor:
    """Return per-row values (N,) as the spec's reduction has them: 0-d, or as they are for "none"."""
    if facts.spec.reduction == "none":
        return values
    total = torch.empty((), dtype=torch.float32, device=values.device)
    launch(_sum_kernel, (1,), values, facts.divisor, total, len(values), BLOCK=4096, num_warps=16)
    return total


@triton.jit
def _target_logits_kernel(
    hidden,  # (R, D), then its strides
    hidden_row,
    hidden_column,
    weight,  # (V, D), then its strides
    weight_row,
    weight_column,
    bias,  # (V,) or None, elements `bias_stride` apart
    bias_stride,
    target,  # (R,)
    found,  # (R,)
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(target + row)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        columns = (first + tl.arange(0, BLOCK)).to(tl.int64)
        inside = columns < size
        h = tl.load(hidden + row * hidden_row + columns * hidden_column, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + y * weight_row + columns * weight_column, mask=inside, other=0.0).to(tl.float32)
        sums += h * w
    z = tl.sum(sums, 0)
    if bias is not None:
        z += tl.load(bias + y * bias_stride).to(tl.float32)
    tl.store(found + row, z)


def target_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Return the float32 logits (R,) of each row's target class, for hidden (R, D), weight (V, D) and bias (V,)."""
    found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    size = hidden.shape[1]
    launch(
        _target_logits_kernel,
        (len(hidden),),
        hidden,
        *hidden.stride(),
        weight,
        *weight.stride(),
        bias,
        0 if bias is None else bias.stride(0),
        target,
        found,
        size,
        BLOCK=min(next_power_of_2(size), 2048),
        num_warps=4,
    )
    return found


@triton.jit
def _scale_kernel(grad, upstream, deferred, count, BLOCK: tl.constexpr):
    factor = tl.load(upstream).to(tl.float32) * tl.load(deferred)
    if factor != 1:
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            places = first + tl.arange(0, BLOCK)
            inside = places < count
            scaled = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32) * factor
            tl.store(grad + places, scaled.to(grad.dtype.element_ty), mask=inside)


def scale_(grad: Tensor, upstream: Tensor, deferred: Tensor) -> None:
    """Multiply a gradient by two 0-d factors in place, rounding once; leave it alone where they make 1."""
    if not is_dense(grad):
        plain.scale_(grad, upstream, deferred)
        return
    count = grad.numel()
    programs = min(cdiv(count, 4096), 4 * multiprocessors(grad.device))
    launch(_scale_kernel, (max(programs, 1),), grad, upstream, deferred, count, BLOCK=4096, num_warps=8)
