"""The gradient of a row, computed from its sums: of a block of raw logits, of the target's, and of the whole row."""

import triton
import triton.language as tl

from xent.backends.triton.kernels.maths import FLOOR, LN2, LOG2E, activate, capped_exponent, exponent, slope, times
from xent.backends.triton.kernels.memory import edges, fetch, store

__all__ = ["row_factors", "write_gradient"]


@triton.jit
def row_factors(gamma, excess, beta, delta, z_y, w_y, rest, e2_y, nll, log_sum, bend, TILTED: tl.constexpr):
    """Return factor and tilt of a row from its coefficients, and the gradient of the target's raw logit.

    The gradient of another class is (e^(x - m) (factor + tilt log2(e) (x - m)) - delta w) dx/dz.
    """
    e_y = tl.math.exp2(e2_y)
    total = rest + e_y
    factor = (gamma + excess) / total
    g_y = times(excess, e_y / total) - gamma * (rest / total) - delta * w_y
    tilt = 0.0
    if TILTED:
        factor -= beta * log_sum / total
        tilt = LN2 * beta / total
        g_y -= beta * times(e_y / total, nll)
    if bend[0] is not None or bend[1] is not None:
        g_y *= slope(z_y, bend, False)
    return factor, tilt, g_y


@triton.jit
def _block(z, classes, vocabulary, terms, class_weight, bend, way: tl.constexpr, FOLDED: tl.constexpr):
    """Return the gradient of a block of raw logits; at the target it is wrong and must be overwritten.

    `terms` are m, factor, tilt and delta. With FOLDED, the factor is in the exponent: the first is
    log2(e) m - log2(factor), in units of log2.
    """
    reference, factor, tilt, delta = terms
    if FOLDED and (way.capped and way.quick):
        g = tl.math.exp2(capped_exponent(z, bend, reference))
    elif FOLDED:
        g = tl.math.exp2(tl.fma(activate(z, bend, way.quick), LOG2E, -reference))
    else:
        e2 = exponent(activate(z, bend, way.quick), reference, way.exact)
        g = tl.math.exp2(e2) * (tl.fma(tl.maximum(e2, FLOOR), tilt, factor) if way.tilted else factor)
    if way.smoothed:
        if class_weight is not None:
            inside = (classes >= 0) & (classes < vocabulary)
            g = tl.fma(tl.load(class_weight + classes, mask=inside, other=0.0), -delta, g)
        else:
            g -= delta
    if way.capped or way.scaled:
        g *= slope(z, bend, way.quick)
    return g


@triton.jit
def _write(
    place, z, first, off, vocabulary, terms, class_weight, bend, way: tl.constexpr, FOLDED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block."""
    classes = first + tl.arange(0, way.block) - off
    g = _block(z, classes, vocabulary, terms, class_weight, bend, way, FOLDED)
    store(place, first, g, off, vocabulary, way, MASKED)


@triton.jit
def write_gradient(
    line, place, start, terms, class_weight, bend, way: tl.constexpr, FOLDED: tl.constexpr
):  # fmt: skip
    """Write the gradient of a row's blocks from `start` to the last one, in which the target's is still wrong.

    It goes backwards from the end of the row, which is still in the caches if the row was just read. Each block is
    loaded while the previous one is computed. The last block is masked, and the first block of a skewed row. Partial
    vectors of a ragged row are written at the end.
    """
    BLOCK: tl.constexpr = way.block
    source, off, last, whole, vocabulary = line
    ahead = fetch(source, last, whole, way, "evict_first")
    if not way.whole:
        z = ahead
        ahead = fetch(source, tl.maximum(last - BLOCK, start), last, way, "evict_first")
        _write(place, z, last, off, vocabulary, terms, class_weight, bend, way, FOLDED, True)
    blocks = (last - start) // BLOCK + (1 if way.whole else 0)
    least = 1 if way.skewed else 0
    for back in range(least, blocks):
        first = start + (blocks - 1 - back + least) * BLOCK
        z = ahead
        ahead = fetch(source, tl.maximum(first - BLOCK, start), first, way, "evict_first")
        _write(place, z, first, off, vocabulary, terms, class_weight, bend, way, FOLDED, False)
    if way.skewed:
        if last > start:
            _write(place, ahead, start, off, vocabulary, terms, class_weight, bend, way, FOLDED, True)
    if way.ragged:
        places, inside = edges(start, last + BLOCK, off, vocabulary, way.vector)
        z = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
        g = _block(z, places - off, vocabulary, terms, class_weight, bend, way, FOLDED)
        tl.store(place + places, g.to(place.dtype.element_ty), mask=inside)
