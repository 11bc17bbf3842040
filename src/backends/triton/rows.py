"""The row kernel in plain Triton, for every option: a row is read once for the losses and once for the gradient.

With x, e, w, a as in `xent.cross_entropy`, r the row's factor of the gradient, and W = sum_c w_c::

    log p = x - max x - log sum_c exp(x_c - max x)
    l     = a [ (1-e) w_y (-log p_y) + (e/V) sum_c w_c (-log p_c) + zeta lse^2 ]
    dl/dz = r [ ((1-e) w_y + (e/V) W + 2 zeta lse) p - (1-e) w_y [c==y] - (e/V) w_c ] dx/dz

For the target the bracket is w_y (1-e) (p_y - 1) and the rest, with p_y - 1 = expm1(log p_y).
For class probabilities q, w_c ((1-e) q_c + e/V) stands for both shares of class c, and their sum for the bracket's
first two terms. What has no share is 0 even where its log p is -inf.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from xent.backends.triton.maths import (
    activate,
    add_exponentials,
    expm1,
    in_lanes,
    join_lanes,
    lowest_of_largest,
    order,
    times,
    with_target,
)
from xent.backends.triton.ring import launch_ring, ring_for

__all__ = ["TritonPass", "rows_kernel"]

_LARGEST_BLOCK = 8192
_LANE = 8  # elements: 16 bytes of the 16-bit dtypes


@triton.jit
def _share(q, w, keep, spread):
    return (keep * q + spread) * w


@triton.jit(do_not_specialize=["start"])
def rows_kernel(
    logits,  # (R, V), rows `logits_stride` apart
    logits_stride,
    grad,  # (R, V) or None; may be the logits
    grad_stride,
    start,  # the block's first row among all N
    target,  # (N,) int64, or None for probabilities
    weight,  # (N,) a
    scale,  # (N,) r
    dead,  # (N,) bool: loss and gradient are exactly 0
    target_logits,  # (R,) or None: take the place of the targets' raw logits
    class_weight,  # (V,) or None
    class_weight_total,  # () or None
    probabilities,  # (R, V) or None
    probability_row,
    probability_class,  # strides
    loss,  # (N,) like all results; None where not asked for
    peaks,
    log_sums,
    lse,
    nll,
    entropy,
    predictions,
    z_term,
    vocabulary,
    keep,  # 1 - e
    spread,  # e / V
    z_loss,
    softcap,
    logit_scale,
    SKIPS_DEAD: tl.constexpr,  # nobody asks for statistics of dead rows
    FORWARD: tl.constexpr,  # find the norm and record results, or else load the norm
    SPLIT: tl.constexpr,  # a program for each block of a row, which is possible once the norm is known
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Losses, results and gradient of one row, or of one block of it: see the module's docstring."""
    here = tl.program_id(0).to(tl.int64)
    row = start + here
    begin = tl.program_id(1) * BLOCK if SPLIT else 0
    end = tl.minimum(begin + BLOCK, vocabulary) if SPLIT else vocabulary
    is_dead = tl.load(dead + row) != 0
    if is_dead & SKIPS_DEAD:
        if FORWARD:
            tl.store(loss + row, 0.0)
            if z_term is not None:
                tl.store(z_term + row, 0.0)
            if peaks is not None:
                tl.store(peaks + row, 0.0)
                tl.store(log_sums + row, 0.0)
        if grad is not None:
            for first in range(begin, end, BLOCK):
                columns = first + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], grad.dtype.element_ty)
                tl.store(grad + here * grad_stride + columns, zeros, mask=columns < vocabulary)
        return

    logits += here * logits_stride
    a = tl.load(weight + row)
    total_share = keep + spread * vocabulary
    y = 0
    z_y = 0.0
    x_y = 0.0
    share_y = keep
    if target is not None:
        y = tl.load(target + row)
        z_y = tl.load(logits + y).to(tl.float32) if target_logits is None else tl.load(target_logits + here)
        x_y, _slope_y = activate(z_y, logit_scale, softcap, SCALED, CAPPED)
        if class_weight is not None:
            share_y = keep * tl.load(class_weight + y)
            total_share = share_y + spread * tl.load(class_weight_total)
    else:
        probabilities += here * probability_row
        if grad is not None:
            total_share = 0.0
            for first in range(0, vocabulary, BLOCK):
                columns = first + tl.arange(0, BLOCK)
                inside = columns < vocabulary
                q = tl.load(probabilities + columns.to(tl.int64) * probability_class, mask=inside, other=0.0)
                w = 1.0 if class_weight is None else tl.load(class_weight + columns, mask=inside, other=0.0)
                total_share += tl.sum(tl.where(inside, _share(q.to(tl.float32), w, keep, spread), 0.0), 0)

    if FORWARD:
        peak_lanes = tl.full([LANES], -float("inf"), tl.float32)
        total_lanes = tl.zeros([LANES], tl.float32)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        at = tl.arange(0, BLOCK)
        for first in range(0, vocabulary, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < vocabulary
            z = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
            if predictions is not None:
                key = order(z, inside, logit_scale)
                at = tl.where(key > best, columns, at)
                best = tl.maximum(best, key)
            x, _slope = activate(z, logit_scale, softcap, SCALED, CAPPED)
            if SCALED or CAPPED:
                x = tl.where(inside, x, -float("inf"))
            if target is not None:
                if (y >= first) & (y < first + BLOCK):
                    x = tl.where(columns == y, -float("inf"), x)
            peak_lanes, total_lanes = add_exponentials(peak_lanes, total_lanes, in_lanes(x, LANES))
        peak, total = join_lanes(peak_lanes, total_lanes)
        if target is not None:
            peak, log_sum = with_target(peak, total, x_y)
        else:
            log_sum = tl.log(total)
        if peaks is not None:
            tl.store(peaks + row, peak)
            tl.store(log_sums + row, log_sum)
        if lse is not None:
            tl.store(lse + row, peak + log_sum)
        if predictions is not None:
            _top, prediction = lowest_of_largest(best, at)
            tl.store(predictions + row, prediction.to(tl.int64))
    else:
        peak = tl.load(peaks + row)
        log_sum = tl.load(log_sums + row)

    slope_of_lse = total_share + 2 * z_loss * (peak + log_sum) if Z_LOSS else total_share
    r = tl.load(scale + row) if grad is not None else 0.0
    log_p_y = 0.0
    at_y = 0.0  # the bracket for the target, whose p - 1 would cancel where p is nearly 1
    if target is not None:
        log_p_y = (x_y - peak) - log_sum
        at_y = share_y * expm1(log_p_y) + (slope_of_lse - share_y) * tl.exp(log_p_y)
    spread_loss = tl.zeros([BLOCK], tl.float32)  # share times -log p
    raw_loss = tl.zeros([BLOCK], tl.float32)  # the same for the given probabilities, without smoothing and weights
    mixed = tl.zeros([BLOCK], tl.float32)  # p times -log p
    LOOKS_AGAIN: tl.constexpr = grad is not None or (FORWARD and (SMOOTHED or target is None or entropy is not None))
    if LOOKS_AGAIN:
        for first in range(begin, end, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < vocabulary
            z = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
            if target_logits is not None:
                z = tl.where(columns == y, z_y, z)
            x, slope = activate(z, logit_scale, softcap, SCALED, CAPPED)
            log_p = (x - peak) - log_sum
            p = tl.exp(log_p)
            share = tl.zeros_like(p)
            if target is None:
                q = tl.load(probabilities + columns.to(tl.int64) * probability_class, mask=inside, other=0.0)
                q = q.to(tl.float32)
                w = 1.0 if class_weight is None else tl.load(class_weight + columns, mask=inside, other=0.0)
                share = tl.where(inside, _share(q, w, keep, spread), 0.0)
                if FORWARD and nll is not None:
                    raw_loss -= times(q, log_p)
            elif SMOOTHED:
                w = 1.0 if class_weight is None else tl.load(class_weight + columns, mask=inside, other=0.0)
                share = tl.where(inside, spread * w, 0.0)
            if FORWARD and (SMOOTHED or target is None):
                spread_loss -= times(share, log_p)
            if FORWARD and entropy is not None:
                mixed -= times(tl.where(inside, p, 0.0), log_p)
            if grad is not None:
                bracket = slope_of_lse * p
                if target is not None:
                    bracket = tl.where(columns == y, at_y, bracket)
                g = tl.where(is_dead, 0.0, r * (bracket - share) * slope)
                tl.store(grad + here * grad_stride + columns, g.to(grad.dtype.element_ty), mask=inside)

    if FORWARD:
        row_loss = tl.sum(spread_loss, 0)
        row_nll = tl.sum(raw_loss, 0)
        if target is not None:
            row_loss -= times(share_y, log_p_y)
            row_nll = -log_p_y
        if nll is not None:
            tl.store(nll + row, row_nll)
        if entropy is not None:
            tl.store(entropy + row, tl.sum(mixed, 0))
        squared = z_loss * (peak + log_sum) * (peak + log_sum)
        if Z_LOSS:
            row_loss += squared
        tl.store(loss + row, tl.where(is_dead, 0.0, a * row_loss))
        if z_term is not None:
            tl.store(z_term + row, tl.where(is_dead, 0.0, a * squared))


class TritonPass:
    """A `xent.backends.protocol.RowPass` over the rows of one call."""

    def __init__(self, facts: Any, results: Any) -> None:
        self.facts, self.results = facts, results
        self._dead = torch.zeros_like(facts.ignored) if facts.dead is None else facts.dead
        self._class_weight = None if facts.class_weight is None else facts.class_weight.contiguous()
        stats = (results.lse, results.nll, results.entropy, results.predictions)
        self._skips_dead = all(result is None for result in stats)

    def forward(self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None = None) -> None:
        """Take a block of rows: see `xent.backends.protocol.RowPass.forward`."""
        ring = None if grad is None or not len(logits) else ring_for(logits, grad, self.facts, self.results)
        if ring is not None and grad is not None:
            launch_ring(ring, logits, start, grad, target_logits, self.facts, self.results)
            return
        self._launch(logits, start, grad, target_logits, forward=True)

    def backward(self, logits: Tensor, start: int, grad: Tensor, target_logits: Tensor | None = None) -> None:
        """Write a block's gradient: see `xent.backends.protocol.RowPass.backward`."""
        self._launch(logits, start, grad, target_logits, forward=False)

    def _launch(
        self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None, forward: bool
    ) -> None:
        facts, results, spec = self.facts, self.results, self.facts.spec
        count, vocabulary = logits.shape
        if not count:
            return
        probabilities = None if facts.target is not None else facts.probability_block(start, start + count)
        block = min(triton.next_power_of_2(vocabulary), _LARGEST_BLOCK)
        split = not forward and facts.target is not None
        peaks, log_sums = (None, None) if results.norm is None else results.norm.unbind(0)
        rows_kernel[(count, triton.cdiv(vocabulary, block) if split else 1)](
            logits,
            logits.stride(0),
            grad,
            0 if grad is None else grad.stride(0),
            start,
            facts.target,
            facts.weight,
            facts.scale,
            self._dead,
            target_logits,
            self._class_weight,
            None if facts.class_weight is None else facts.class_weight_total,
            probabilities,
            0 if probabilities is None else probabilities.stride(0),
            0 if probabilities is None else probabilities.stride(1),
            results.loss,
            peaks,
            log_sums,
            results.lse,
            results.nll,
            results.entropy,
            results.predictions,
            results.z_term,
            vocabulary,
            1 - spec.label_smoothing,
            spec.label_smoothing / vocabulary,
            spec.z_loss,
            spec.softcap or 0.0,
            spec.logit_scale,
            SKIPS_DEAD=self._skips_dead,
            FORWARD=forward,
            SPLIT=split,
            SMOOTHED=spec.label_smoothing != 0,
            Z_LOSS=spec.z_loss != 0,
            CAPPED=spec.softcap is not None,
            SCALED=spec.logit_scale != 1,
            BLOCK=block,
            LANES=max(block // _LANE, 1),
            num_warps=min(max(block // 1024, 1), 8),
        )
