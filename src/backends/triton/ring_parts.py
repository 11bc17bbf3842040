"""What the ring kernel is made of, in Gluon: its arithmetic, a block in a slot, and a row's sum among programs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["activate", "await_word", "exp", "fade", "finite", "fold", "pack", "read", "reciprocal", "widen"]

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def exp(x):
    """Return e^x, 0 where it is too small for a normal float32."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2E], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """Return 1 / x, to two units of the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def finite(largest):
    """Return what exponents are taken relative to: the largest x, and 0 where there was nothing but -inf."""
    return gl.where(largest == float("-inf"), 0.0, largest)


@gluon.jit
def fade(c, larger):
    """Return what turns a sum relative to c into one relative to a larger reference."""
    return exp(gl.minimum(c - larger, 0.0))


@gluon.jit
def widen(z):
    """Return a block in float32. A bfloat16 is the upper half of one: two to a register, one instruction each."""
    if z.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=f,=f,r",
            [z],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return z.to(gl.float32)


@gluon.jit
def activate(z, logit_scale, softcap, SCALED: gl.constexpr, CAPPED: gl.constexpr):
    """Return x = k tanh(s z / k), or s z. k - 2k / (1 + e^2v) is exact enough for logits of 16 bits."""
    x = z
    if SCALED:
        x = x * logit_scale
    if CAPPED:
        x = softcap - 2 * softcap * reciprocal(1 + exp(x * (2 / softcap)))
    return x


@gluon.jit
def pack(high, low):
    """Return (float32, float32) as one word. Never 0 here: a sum of 0 comes with a maximum of -inf."""
    high = high.to(gl.uint32, bitcast=True).to(gl.uint64) << 32
    return (high | low.to(gl.uint32, bitcast=True).to(gl.uint64)).to(gl.int64, bitcast=True)


@gluon.jit
def await_word(word_ptr):
    """Return what `pack` put into a word, once it is there."""
    word = gl.load(word_ptr, volatile=True)
    while word == 0:
        word = gl.load(word_ptr, volatile=True)
    high = (word >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    return high, word.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def read(
    slot, logit_scale, softcap, SCALED: gl.constexpr, CAPPED: gl.constexpr, FLAT: gl.constexpr, CUBE: gl.constexpr
):
    """Return x of a block in a slot as [REP, THREADS, VEC], of which the first and last axes lie within a thread."""
    REP: gl.constexpr = CUBE.size_per_thread[0]
    VEC: gl.constexpr = CUBE.size_per_thread[2]
    z = slot.load(FLAT)
    z = gl.convert_layout(z.reshape([REP, z.shape[1] // (REP * VEC), VEC]), CUBE, assert_trivial=True)
    return activate(widen(z), logit_scale, softcap, SCALED, CAPPED)


@gluon.jit
def fold(m, c, s, x):
    """Return each thread's largest x so far, what its sum is relative to, and the sum, with a block x."""
    m = gl.maximum(m, gl.max(gl.max(x, 2), 0))
    larger = finite(m)
    e = exp(x - larger[None, :][:, :, None])
    return m, larger, s * fade(c, larger) + gl.sum(gl.sum(e, 2), 0)
