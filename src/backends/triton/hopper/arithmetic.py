"""Barriers and arithmetic of the Gluon kernels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

__all__ = ["LOG2E", "barriers", "bent", "exp2", "fade", "finite"]

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def barriers(COUNT: gl.constexpr, READERS: gl.constexpr):
    """Return arrays of COUNT "full" and COUNT "empty" barriers in shared memory, for the slots of a ring.

    A "full" barrier expects one arrival, an "empty" barrier READERS arrivals. A fence is needed before the copy engine
    uses them, or it might find uninitialised barriers.
    """
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=READERS)
    return full, empty


@gluon.jit
def exp2(x):
    """Return 2^x; 0 if it is too small for a normal float32."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    """Return 1 / x, to two units in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def finite(largest):
    """Return `largest`, or 0 if it is -inf, as the reference of exponents."""
    return gl.where(largest == float("-inf"), 0.0, largest)


@gluon.jit
def fade(c, larger):
    """Return the factor that converts a sum relative to c into one relative to a larger reference."""
    return exp2(gl.minimum(c - larger, 0.0) * LOG2E)


@gluon.jit
def _below(x, softcap):
    """Return 1 / (1 + e^(2 x / k)), from which both the softcap and its slope are computed."""
    return _reciprocal(1 + exp2(x * (2 * LOG2E / softcap)))


@gluon.jit
def bent(z, bend, SCALED: gl.constexpr, CAPPED: gl.constexpr):
    """Return x = k tanh(s z / k), or s z, for bend = (s, k), and dx/dz = s (1 - tanh(s z / k)^2), or s.

    The softcap is computed as k - 2k / (1 + e^(2 s z / k)), which is exact enough for 16-bit logits. The slope does not
    cancel.
    """
    logit_scale, softcap = bend
    x = z
    steep = z
    if SCALED:
        x = x * logit_scale
    if CAPPED:
        below = _below(x, softcap)
        x = softcap - 2 * softcap * below
        steep = 4 * below * (1 - below)
        if SCALED:
            steep = steep * logit_scale
    elif SCALED:
        steep = gl.zeros_like(z) + logit_scale
    return x, steep
