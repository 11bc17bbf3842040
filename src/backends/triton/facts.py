"""What is known about each row before its logits are, found in one launch.

Programs take blocks of rows. Each of them adds up all rows for itself, in a fixed order: that takes no longer than if
one did and the others waited.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from xent.backends.torch import facts as plain
from xent.backends.torch.facts import Facts
from xent.backends.torch.options import Options
from xent.backends.triton.launch import cdiv, launch

__all__ = ["gather_facts"]

_ADDED = 8192  # rows at a time
_BLOCK = 1024
_PROGRAMS = 64  # at most
_WARPS = 16


@triton.jit
def _row_facts(
    rows, count, target, sample_weight, class_weight, length, shift, ignore_index, vocabulary, SHIFTED: tl.constexpr
):
    """Return target, weight a, a w_y, ignored and invalid of a block of rows; 0 beyond the last."""
    has_target = rows < count
    source = rows
    if SHIFTED:
        has_target &= rows % length + shift < length
        source = rows + shift
    y = tl.load(target + source, mask=has_target, other=0).to(tl.int64)
    ignored = (y == ignore_index) | ~has_target
    invalid = ((y < 0) | (y >= vocabulary)) & ~ignored
    y = tl.where(ignored | invalid, 0, y)
    if sample_weight is None:
        a = tl.where(ignored, 0.0, 1.0)
    else:
        a = tl.where(ignored, 0.0, tl.load(sample_weight + source, mask=has_target, other=0.0).to(tl.float32))
    weighted = a if class_weight is None else a * tl.load(class_weight + y).to(tl.float32)
    return y, a, weighted, ignored, invalid


@triton.jit(do_not_specialize=["count", "length", "shift", "ignore_index"])
def _facts_kernel(
    target,  # (N,) integers
    sample_weight,  # (N,) or None
    class_weight,  # (V,) or None
    normalizer,  # () or None
    upstream,  # (N,) or None, elements `upstream_stride` apart
    upstream_stride,
    clean_target,  # results, all (N,)
    weight,
    scale,
    ignored,
    dead,
    invalid,
    divisor,  # ()
    deferred,  # ()
    number,  # the normalizer where it is a number
    count,
    length,
    shift,
    ignore_index,
    vocabulary,
    MEAN: tl.constexpr,
    NUMBER: tl.constexpr,
    SHIFTED: tl.constexpr,
    NARROW: tl.constexpr,  # float16 logits
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sums = tl.zeros([ADDED], tl.float32)
    sizes = tl.zeros([ADDED], tl.float32)
    SUMS: tl.constexpr = MEAN and ((normalizer is None and not NUMBER) or NARROW)
    if SUMS:
        for first in range(0, count, ADDED):
            _, a, weighted, _, wrong = _row_facts(
                first + tl.arange(0, ADDED),
                count,
                target,
                sample_weight,
                class_weight,
                length,
                shift,
                ignore_index,
                vocabulary,
                SHIFTED,
            )
            sums += tl.where(wrong, 0.0, weighted)
            size = tl.abs(weighted)
            sizes = tl.maximum(sizes, tl.where(wrong | (size != size), 0.0, tl.minimum(size, 3.4e38)))
    d = tl.sum(sums, 0)
    if NUMBER:
        d = number
    elif normalizer is not None:
        d = tl.load(normalizer).to(tl.float32)
    one = tl.full((), 1.0, tl.float32)
    inverse = one
    rest = one
    if MEAN:
        inverse = tl.where(d == 0, 0.0, tl.div_rn(one, tl.where(d == 0, 1.0, d)))
        if NARROW:
            # 1/D would push float16 gradients under the smallest number before a loss scale lifts them, and weights
            # could push them over the largest: what is stored has rows of size 1, and `deferred` has the rest.
            largest = tl.max(sizes, 0)
            largest = tl.where(largest == 0, 1.0, largest)
            rest = inverse * largest
            inverse = tl.div_rn(one, largest)
        if tl.program_id(0) == 0:
            tl.store(divisor, d)
    if tl.program_id(0) == 0:
        tl.store(deferred, rest)
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        rows = first + tl.arange(0, BLOCK)
        inside = rows < count
        y, a, _, without, wrong = _row_facts(
            rows, count, target, sample_weight, class_weight, length, shift, ignore_index, vocabulary, SHIFTED
        )
        nothing = (tl.where(d == 0, 0.0, a) if MEAN else a) == 0
        a = tl.where(wrong, float("nan"), a)
        r = a * inverse
        if upstream is not None:
            r *= tl.load(upstream + rows.to(tl.int64) * upstream_stride, mask=inside, other=0.0).to(tl.float32)
        tl.store(clean_target + rows, y, mask=inside)
        tl.store(weight + rows, a, mask=inside)
        tl.store(scale + rows, r, mask=inside)
        tl.store(ignored + rows, without, mask=inside)
        tl.store(dead + rows, nothing & ~wrong, mask=inside)
        tl.store(invalid + rows, wrong, mask=inside)


def gather_facts(
    options: Options, vocabulary: int, dtype: torch.dtype, shift: int = 0, upstream: Tensor | None = None
) -> Facts:
    """Return the facts of all rows of a call: see `xent.backends.torch.facts.gather_facts`."""
    target, sample_weight = options.target, options.sample_weight
    if target.is_floating_point():
        return plain.gather_facts(options, vocabulary, dtype, shift, upstream)
    plain.check_targets(options, vocabulary, shift)
    spec, device, count = options.spec(), target.device, target.numel()
    number, normalizer = plain.normalizer(options, device)
    # Each in memory of its own, which begins on a boundary of 16 bytes: else the kernel would be compiled again.
    clean = torch.empty(count, dtype=torch.int64, device=device)
    weight, scale = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(2))
    ignored, dead, invalid = (torch.empty(count, dtype=torch.bool, device=device) for _ in range(3))
    divisor, deferred = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))
    mean = spec.reduction == "mean"
    class_weight: Any = None if options.weight is None else options.weight.float().contiguous()
    flat_upstream = None if upstream is None else upstream.reshape(-1)
    launch(
        _facts_kernel,
        (max(min(cdiv(count, _BLOCK), _PROGRAMS), 1),),
        target.contiguous(),
        None if sample_weight is None else sample_weight.contiguous(),
        class_weight,
        normalizer,
        flat_upstream,
        0 if flat_upstream is None or count < 2 else flat_upstream.stride(0),
        clean,
        weight,
        scale,
        ignored,
        dead,
        invalid,
        divisor,
        deferred,
        0.0 if number is None else number,
        count,
        target.shape[-1] if target.dim() else 1,
        shift,
        options.ignore_index,
        vocabulary,
        MEAN=mean,
        NUMBER=number is not None,
        SHIFTED=shift > 0,
        NARROW=dtype == torch.float16,
        ADDED=_ADDED,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return Facts(
        spec=spec,
        vocabulary=vocabulary,
        target=clean,
        probabilities=None,
        probability_rows=None,
        ignored=ignored,
        dead=dead,
        invalid=invalid,
        weight=weight,
        scale=scale,
        deferred=deferred,
        divisor=divisor if mean else None,
        class_weight=class_weight,
        class_weight_total=vocabulary if class_weight is None else class_weight.sum(),
    )
