"""The gradient of a row, computed from its sums: of a block of raw logits, of the target's, and of the whole row."""

import triton
import triton.language as tl

from xent.backends.triton.kernels.maths import (
    FLOOR,
    LOG2E,
    activate,
    capped_exponent,
    exponent,
    quick_exponent,
    slope,
    times,
)
from xent.backends.triton.kernels.memory import edges, fetch, store

__all__ = ["gradient_block", "target_gradient", "write_gradient"]


@triton.jit
def gradient_block(
    z, classes, vocabulary, reference, exact, factor, tilt, delta, class_weight, logit_scale, softcap,
    CAREFUL: tl.constexpr, QUICK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
    TILTED: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a block of raw logits; at the target it is wrong and must be overwritten.

    It is (e^(x - reference) (factor + tilt log2(e) (x - reference)) - delta w) dx/dz. Without TILTED, tilt is 0. With
    FOLDED, the factor is in the exponent: `reference` is log2(e) m - log2(factor), in units of log2.
    """
    if FOLDED and (CAPPED and QUICK):
        g = tl.math.exp2(capped_exponent(z, logit_scale, softcap, reference, SCALED))
    elif FOLDED:
        g = tl.math.exp2(tl.fma(activate(z, logit_scale, softcap, SCALED, CAPPED, QUICK), LOG2E, -reference))
    else:
        x = activate(z, logit_scale, softcap, SCALED, CAPPED, QUICK)
        if CAREFUL:
            e2 = exponent(x, reference, exact)
        else:
            e2 = quick_exponent(x, reference)
        g = tl.math.exp2(e2) * (tl.fma(tl.maximum(e2, FLOOR), tilt, factor) if TILTED else factor)
    if SMOOTHED:
        if class_weight is not None:
            inside = (classes >= 0) & (classes < vocabulary)
            g = tl.fma(tl.load(class_weight + classes, mask=inside, other=0.0), -delta, g)
        else:
            g -= delta
    if CAPPED or SCALED:
        g *= slope(z, logit_scale, softcap, SCALED, CAPPED, QUICK)
    return g


@triton.jit
def target_gradient(
    z_y, others, total, e_y, gamma, excess, beta, nll, delta, w_y, logit_scale, softcap,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, TILTED: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the target's raw logit."""
    g = times(excess, e_y / total) - gamma * (others / total) - delta * w_y
    if TILTED:
        g -= beta * times(e_y / total, nll)
    if CAPPED or SCALED:
        g *= slope(z_y, logit_scale, softcap, SCALED, CAPPED, False)
    return g


@triton.jit
def write_gradient(
    source, place, off, start, last, vocabulary, whole, reference, exact, factor, tilt, delta, class_weight,
    logit_scale, softcap, BLOCK: tl.constexpr, RAGGED: tl.constexpr, VECTOR: tl.constexpr, SKEWED: tl.constexpr,
    WHOLE: tl.constexpr, CAREFUL: tl.constexpr, QUICK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr, TILTED: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row's blocks from `start` to `last`, in which the target's gradient is still wrong.

    It goes backwards from the end of the row, which is still in the caches if the row was just read. Each block is
    loaded while the previous one is computed. The last block is masked, and the first block of a SKEWED row. Partial
    vectors of a RAGGED row are written at the end.
    """
    ahead = fetch(source, last, whole, BLOCK, VECTOR, "evict_first")
    if not WHOLE:
        z = ahead
        ahead = fetch(source, tl.maximum(last - BLOCK, start), last, BLOCK, VECTOR, "evict_first")
        g = gradient_block(
            z, last + tl.arange(0, BLOCK) - off, vocabulary, reference, exact, factor, tilt, delta, class_weight,
            logit_scale, softcap, CAREFUL, QUICK, SCALED, CAPPED, SMOOTHED, TILTED, FOLDED,
        )  # fmt: skip
        store(place, last, g, off, vocabulary, BLOCK, True, RAGGED, VECTOR)
    blocks = (last - start) // BLOCK + (1 if WHOLE else 0)
    least = 1 if SKEWED else 0
    for back in range(least, blocks):
        first = start + (blocks - 1 - back + least) * BLOCK
        z = ahead
        ahead = fetch(source, tl.maximum(first - BLOCK, start), first, BLOCK, VECTOR, "evict_first")
        g = gradient_block(
            z, first + tl.arange(0, BLOCK) - off, vocabulary, reference, exact, factor, tilt, delta, class_weight,
            logit_scale, softcap, CAREFUL, QUICK, SCALED, CAPPED, SMOOTHED, TILTED, FOLDED,
        )  # fmt: skip
        store(place, first, g, off, vocabulary, BLOCK, False, RAGGED, VECTOR)
    if SKEWED:
        if last > start:
            g = gradient_block(
                ahead, start + tl.arange(0, BLOCK) - off, vocabulary, reference, exact, factor, tilt, delta,
                class_weight, logit_scale, softcap, CAREFUL, QUICK, SCALED, CAPPED, SMOOTHED, TILTED, FOLDED,
            )  # fmt: skip
            store(place, start, g, off, vocabulary, BLOCK, True, RAGGED, VECTOR)
    if RAGGED:
        places, inside = edges(start, last + BLOCK, off, vocabulary, VECTOR)
        z = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
        g = gradient_block(
            z, places - off, vocabulary, reference, exact, factor, tilt, delta, class_weight, logit_scale, softcap,
            CAREFUL, QUICK, SCALED, CAPPED, SMOOTHED, TILTED, FOLDED,
        )  # fmt: skip
        tl.store(place + places, g.to(place.dtype.element_ty), mask=inside)
