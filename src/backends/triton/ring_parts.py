"""What the ring kernel is made of, in Gluon: its barriers and arithmetic, a block in a slot, a row among programs.

The kernels that multiply take the first two as well.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

__all__ = ["activate", "barriers", "exchange", "exp", "fade", "finite", "fold", "read"]

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def barriers(COUNT: gl.constexpr, READERS: gl.constexpr):
    """Return the barriers of so many places in shared memory: one each for "full", one for "empty", READERS to say so.

    Before the copy engine uses them there has to be a fence, or it might come upon a barrier that is not there yet.
    """
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=READERS)
    return full, empty


@gluon.jit
def exp(x):
    """Return e^x, 0 where it is too small for a normal float32."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2E], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _reciprocal(x):
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
def _widen(z):
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
def activate(z, bend, SCALED: gl.constexpr, CAPPED: gl.constexpr):
    """Return x = k tanh(s z / k), or s z, for bend = (s, k); k - 2k / (1 + e^2v) is exact enough for 16-bit logits."""
    logit_scale, softcap = bend
    x = z
    if SCALED:
        x = x * logit_scale
    if CAPPED:
        x = softcap - 2 * softcap * _reciprocal(1 + exp(x * (2 / softcap)))
    return x


@gluon.jit
def read(slot, bend, SCALED: gl.constexpr, CAPPED: gl.constexpr, FLAT: gl.constexpr, CUBE: gl.constexpr):
    """Return x of a block in a slot as [REP, THREADS, VEC], of which the first and last axes lie within a thread."""
    REP: gl.constexpr = CUBE.size_per_thread[0]
    VEC: gl.constexpr = CUBE.size_per_thread[2]
    z = slot.load(FLAT)
    z = gl.convert_layout(z.reshape([REP, z.shape[1] // (REP * VEC), VEC]), CUBE, assert_trivial=True)
    return activate(_widen(z), bend, SCALED, CAPPED)


@gluon.jit
def fold(m, c, s, x):
    """Return each thread's largest x so far, what its sum is relative to, and the sum, with a block x."""
    m = gl.maximum(m, gl.max(gl.max(x, 2), 0))
    larger = finite(m)
    e = exp(x - larger[None, :][:, :, None])
    return m, larger, s * fade(c, larger) + gl.sum(gl.sum(e, 2), 0)


@gluon.jit
def _pack(high, low):
    """Return (float32, float32) as one word. Never 0 here: a sum of 0 comes with a maximum of -inf."""
    high = high.to(gl.uint32, bitcast=True).to(gl.uint64) << 32
    return (high | low.to(gl.uint32, bitcast=True).to(gl.uint64)).to(gl.int64, bitcast=True)


@gluon.jit
def _await_word(word_ptr):
    """Return what `_pack` put into a word, once it is there."""
    word = gl.load(word_ptr, volatile=True)
    while word == 0:
        word = gl.load(word_ptr, volatile=True)
    high = (word >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    return high, word.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def exchange(words, row64, member, top, ref, others, row_sum, row_sum_x, GROUP: gl.constexpr, SMOOTHED: gl.constexpr):
    """Return reference, sum without and with the target, and sum of x of a whole row, from all programs' parts."""
    WORDS: gl.constexpr = 2 if SMOOTHED else 1
    word = words + row64 * (GROUP * WORDS)
    gl.atomic_xchg(word + member * WORDS, _pack(top, row_sum), sem="relaxed")
    if SMOOTHED:
        gl.atomic_xchg(word + member * WORDS + 1, _pack(row_sum_x * 0 + 1.0, row_sum_x), sem="relaxed")
    tops = ()
    sums = ()
    whole_top = row_sum * 0 + float("-inf")
    whole_x = row_sum * 0
    for j in gl.static_range(GROUP):
        top_j, sum_j = _await_word(word + j * WORDS)
        tops = tops + (top_j,)
        sums = sums + (sum_j,)
        whole_top = gl.maximum(whole_top, top_j)
        if SMOOTHED:
            _, sum_x_j = _await_word(word + j * WORDS + 1)
            whole_x += sum_x_j
    whole_ref = finite(whole_top)
    whole = row_sum * 0
    whole_others = whole
    for j in gl.static_range(GROUP):
        sum_j = sums[j] * fade(finite(tops[j]), whole_ref)
        whole += sum_j
        whole_others += gl.where(member == j, others * fade(ref, whole_ref), sum_j)
    return whole_ref, whole_others, whole, whole_x
