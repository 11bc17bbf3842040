"""The finish in Triton: what is known about a row, and its loss, statistics and gradient coefficients from its sums.

With x, e, w, a as in `xent.cross_entropy`, upstream gradient u, divisor D, r = a u / D and W = sum_c w_c, the sums of a
row relative to a reference m are::

    rest  = sum_{c != y} e^(x_c - m)        total = rest + e^(x_y - m)        lse = m + log total
    mixed = sum_{c != y} e^(x_c - m) (x_c - m)        below = sum_c w_c (m - x_c)

The gradient follows from them::

    dl/dx_c = p_c (gamma + excess + beta log p_c) - gamma [c == y] - delta w_c
    gamma = r (1-e) w_y        excess = r ((e/V) W + 2 zeta lse)        delta = r e/V        beta = 0

For the target this is gamma (p_y - 1) + p_y (excess + beta log p_y) - delta w_y, and p_y - 1 = -rest / total has no
cancellation. Upstream gradients u of lse, n of nll and v of the entropy H add n to gamma, u - v H to excess and -v to
beta, also for rows with sample weight 0.

Here gamma has no share of the smoothing, which is delta; in `xent.backends.torch.portable.steps` it has.

`row` is the index of a row in the call, or a block of indices. `inside` is the mask of a block, None for one row.
`rows`, `upstreams`, `results`, `numbers` and `way` are the groups of `xent.backends.triton.launches`. A call that lacks
a tensor has a null pointer in its place (`is_given`), so that one compiled kernel serves calls with and without it.

Arithmetic that all kernels share: activation of logits and its slope, exponents.

Multiply-adds that must round once are written as `tl.fma`. What the compiler fuses by itself depends on the surrounding
code, so that copies of the same lines (a loop and its last block) could round differently.
"""

import triton
import triton.language as tl

__all__ = [
    "FAR",
    "FLOOR",
    "LN2",
    "LOG2E",
    "NOWHERE",
    "activate",
    "activation_of",
    "divisors_of",
    "exp",
    "exponent",
    "finish",
    "finite",
    "given_rows",
    "gradient_factor",
    "has_statistics",
    "is_given",
    "load",
    "log1p",
    "numbers_of",
    "of_mean",
    "optional",
    "order",
    "position",
    "quick_exponent",
    "record",
    "record_nothing",
    "rounding",
    "row_at",
    "row_facts",
    "slope",
    "tanh",
    "times",
]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# If the reference is this large, subtract before multiplying: its product with log2(e) would round too much.
FAR = tl.constexpr(256.0)
# Base-2 exponents below this are raised to it before multiplying by e^(x - m), which is 0 there: avoids 0 * inf.
FLOOR = tl.constexpr(-300.0)
NOWHERE = tl.constexpr(2147483647)  # a class after all others


@triton.jit
def exp(x):
    """Return e^x; 0 if it is too small for a normal float32. tl.exp needs three more instructions for those values."""
    return tl.math.exp2(x * LOG2E)


@triton.jit
def tanh(u):
    """Return tanh(u) with an error of one or two roundings.

    For small u, 1 - 2 / (exp(2u) + 1) would cancel, so an odd polynomial is used. It has the smallest relative error of
    its degree on [0, 0.625] (Lawson's iteration in float64).
    """
    size = tl.abs(u)
    small = tl.where(size < 0.625, u, 0.0)
    square = small * small
    series = -0.005704986397176981
    series = tl.fma(square, series, 0.02063908614218235)
    series = tl.fma(square, series, -0.05373971536755562)
    series = tl.fma(square, series, 0.13331441581249237)
    series = tl.fma(square, series, -0.3333328068256378)
    near = tl.fma(small * square, series, small)
    far = 1 - 2 / (exp(2 * tl.where(size > 20, 20.0, size)) + 1)
    return tl.where(size < 0.625, near, tl.where(u < 0, -far, far))


@triton.jit
def times(share, value):
    """Return share * value; 0 where the share is 0, even if the value is infinite."""
    return share * tl.where(share == 0, 0.0, value)


@triton.jit
def _sigmoid(z, activation):
    """Return b = 1 / (1 + e^(2 s z / k)), from which both the softcap and its slope are computed.

    A GPU computes special functions at an eighth of its rate, and a capped logit needs two exponentials besides. So
    this reciprocal is made of other operations: a guess from the bits of the number, wrong by up to 1/18, a cubic and a
    quadratic step. Its error is one or two roundings. It is exactly 1 for s z = -inf, where the slope is 0, and at
    least 2e-38.
    """
    power = tl.math.exp2(z * (activation[0] * ((2 * LOG2E) / activation[1])))
    n = tl.maximum(-1 - power, -4e37, propagate_nan=tl.PropagateNan.ALL)
    b = (-0x010E0000 - n.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    rest = tl.fma(n, b, 1.0)
    b = tl.fma(tl.fma(rest, rest, rest), b, b)
    return tl.fma(tl.fma(n, b, 1.0), b, b)


@triton.jit
def activate(z, activation, way: tl.constexpr, EXACT: tl.constexpr = False):
    """Return x = k tanh(s z / k) for activation = (s, k), or s z without a softcap.

    `Way.quick` computes the softcap as k - 2k / (1 + e^(2 s z / k)), with an error of up to k / (3 * 10^6), which is
    enough for 16-bit logits, unless EXACT.
    """
    x = z * activation[0] if way.scaled else z
    if way.capped:
        if way.quick and not EXACT:
            x = tl.fma(_sigmoid(z, activation), -2 * activation[1], activation[1])
        else:
            x = activation[1] * tanh(x / activation[1])
    return x


@triton.jit
def slope(z, activation, way: tl.constexpr, EXACT: tl.constexpr = False):
    """Return dx/dz of `activate`: s (1 - tanh(s z / k)^2), computed without cancellation, or s without a softcap."""
    derivative = tl.zeros_like(z) + activation[0]
    if way.capped:
        if way.quick and not EXACT:
            below = _sigmoid(z, activation)
            derivative = (4 * activation[0]) * tl.fma(-below, below, below)
        else:
            t = exp(-2 * tl.abs(z * activation[0] / activation[1]))
            derivative *= 4 * t / ((1 + t) * (1 + t))
    return derivative


@triton.jit
def quick_exponent(z, activation, reference, way: tl.constexpr):
    """Return log2 of e^x divided by 2^reference, by one multiply-add, after `activate` with a softcap.

    The rounding error of a reference m log2(e) is the same in all terms of a row and cancels.
    """
    if way.capped and way.quick:
        below = _sigmoid(z, activation)
        e2 = tl.fma(below, activation[1] * (-2 * LOG2E), -(reference - activation[1] * LOG2E))
    elif not way.capped:
        e2 = tl.fma(z, activation[0] * LOG2E, -reference)
    else:
        e2 = tl.fma(activate(z, activation, way), LOG2E, -reference)
    return e2


@triton.jit
def exponent(x, reference, EXACT: tl.constexpr):
    """Return log2 of e^(x - reference). It subtracts before it multiplies if EXACT, and for large references."""
    exact = (tl.abs(reference) >= FAR) | EXACT
    return tl.where(exact, (x - reference) * LOG2E, tl.fma(x, LOG2E, -reference * LOG2E))


@triton.jit
def rounding(m, EXACT: tl.constexpr):
    """Return by how much m log2(e) and its float32 rounding differ; 0 if `exponent` subtracts m first."""
    near = tl.where((tl.abs(m) >= FAR) | EXACT, 0.0, m)
    return tl.fma(near, LOG2E, -near * LOG2E)


@triton.jit
def finite(largest):
    """Return `largest`, or 0 if it is -inf or NaN, as the reference of exponents."""
    return tl.where(largest > -float("inf"), largest, 0.0)


@triton.jit
def log1p(r):
    """Return log(1 + r) as r log(w) / (w - 1) with w = 1 + r, in which the rounding error of w cancels."""
    w = 1 + r
    apart = (w != 1) & (w < 2)
    return tl.where(apart, tl.log(w) * (r / tl.where(apart, w - 1, 1.0)), tl.where(w == 1, r, tl.log(w)))


@triton.jit
def order(z, activation, way: tl.constexpr):
    """Return a key with the order of x, computed from raw logits: scale and softcap preserve or reverse it."""
    return z if not way.scaled else z * tl.where(activation[0] < 0, -1.0, tl.where(activation[0] == 0, 0.0, 1.0))


@triton.jit
def position(row, inner, outer_stride, row_stride, GROUPED: tl.constexpr):
    """Return the offset of a row in elements. GROUPED: groups of `inner` rows are `outer_stride` elements apart."""
    row = row.to(tl.int64)
    if GROUPED:
        return (row // inner) * outer_stride + (row % inner) * row_stride
    else:
        return row * row_stride


@triton.jit
def load(place, inside, other):
    """Load what one row has, or a block of rows: `other` outside of the mask."""
    return tl.load(place, mask=inside, other=None if inside is None else other)


@triton.jit
def is_given(pointer):
    """Return whether a pointer of an argument group is neither null nor None."""
    if pointer is None:
        return False
    else:
        return pointer.to(tl.int64) != 0


@triton.jit
def given_rows(pointer, inside):
    """Return a mask of the rows that have something at a pointer: none of them if it is null."""
    present = is_given(pointer)
    return present if inside is None else tl.where(present, inside, False)


@triton.jit
def optional(pointer, place, inside, other):
    """Load what each row has at `place`, as float32. It is `other` outside of the mask, and without a pointer."""
    if pointer is None:
        return other
    else:
        return tl.load(pointer + place, mask=given_rows(pointer, inside), other=other).to(tl.float32)


@triton.jit
def row_at(index, inside, rows):
    """Return the row at an index of the order in which rows are computed."""
    if rows.order is None:
        return index
    else:
        return tl.load(rows.order + index, mask=given_rows(rows.order, inside), other=index)


@triton.jit
def row_facts(row, inside, rows, ignore_index, limit):
    """Return target y (int64), weight a, ignored, invalid. Valid targets are in [0, limit).

    An ignored or invalid row has y = 0. Rows outside of the mask are ignored. Without `rows.target`, every row has -1.
    """
    if inside is None:
        ignored = row < 0
    else:
        ignored = ~inside
    invalid = row < 0
    y = tl.where(ignored, -1, -1).to(tl.int64)
    if rows.target is not None:
        y = load(rows.target + row, inside, 0).to(tl.int64)
        ignored = ignored | (y == ignore_index)
        invalid = ((y < 0) | (y >= limit)) & ~ignored
        y = tl.where(ignored | invalid, 0, y)
    a = tl.where(ignored, 0.0, optional(rows.sample_weight, row, inside, 1.0))
    return y, a, ignored, invalid


@triton.jit
def numbers_of(rows, vocabulary, numbers):
    """Return 1-e, e/V and z-loss: the numbers, or those of `rows.numbers`."""
    in_tensor, smoothing = is_given(rows.numbers), optional(rows.numbers, 0, None, 0.0)
    keep = tl.where(in_tensor, 1 - smoothing, numbers.keep)
    spread = tl.where(in_tensor, smoothing / vocabulary.to(tl.float32), numbers.spread)
    return keep, spread, optional(rows.numbers, 1, None, numbers.z_loss)


@triton.jit
def activation_of(row, inside, rows, numbers):
    """Return logit scale and softcap of a row, divided by its temperature: the numbers, or those of `rows.numbers`."""
    softcap = optional(rows.numbers, 2, None, numbers.softcap)
    logit_scale = optional(rows.numbers, 3, None, numbers.logit_scale)
    temperature = optional(rows.temperature, row, inside, 1.0)
    return tl.div_rn(logit_scale, temperature), tl.div_rn(softcap, temperature)


@triton.jit
def divisors_of(rows):
    """Return the divisor D of a mean, and that of gradients, see `Rows.divisor`."""
    return optional(rows.divisor, 0, None, 1.0), optional(rows.divisor, 1, None, 1.0)


@triton.jit
def has_statistics(upstreams):
    """Return whether there are upstream gradients of statistics."""
    return is_given(upstreams.lse) | is_given(upstreams.nll) | is_given(upstreams.entropy)


@triton.jit
def gradient_factor(row, inside, a, invalid, divisor, upstreams):
    """Return whether a row's loss and gradient are 0, and r; NaN for an invalid target.

    With upstream gradients of statistics, the loss has none if `upstreams.loss` is null. A row whose loss is 0 then has
    a gradient, for which r is 0.
    """
    excluded = (tl.where(divisor == 0, 0.0, a) == 0) & ~invalid
    r = tl.div_rn(a, tl.where(divisor == 0, 1.0, divisor) + tl.zeros_like(a))
    r *= optional(upstreams.loss, row, inside, 1.0)
    r = tl.where(has_statistics(upstreams) & (is_given(upstreams.loss) == 0), 0.0, r)
    r = tl.where(invalid, float("nan"), r)
    return excluded, tl.where(excluded, 0.0, r)


@triton.jit
def finish(
    divisor, row, inside, facts, excluded, r, w_y, z_y, m, sums, e2_y, mean_logit, top_class, q_sums, results,
    upstreams, numbers, activation, way: tl.constexpr, BARRED: tl.constexpr = False,
):  # fmt: skip
    """Record the results of rows. Return factor, log_factor, delta, the gradient of the target's raw logit, and gamma.

    The gradient of another class is (e^(x - m) (factor + log_factor log2(e) (x - m)) - delta w) dx/dz.

    `sums` are rest, below, W, mixed and squares; `below` and W over all classes; those that no result needs may be 0.
    `mixed` and `e2_y`, the target's exponent, are in units of log2. `top_class` is that of the largest x. `facts` are
    those of `row_facts`, `numbers` those of `numbers_of`. BARRED: a target without probability has no gradient.

    With class probabilities q, the loss is a [sum_c w'_c (lse - x_c) + zeta lse^2] for shares w' = w ((1-e) q + e/V).
    So no class is the target, 1-e is 0, and the shares are the class weights of a smoothing with e/V = 1. `q_sums` are
    sum q (m - x) and sum q, for nll, of which gamma is the upstream gradient: gamma q is left to subtract; or None.
    """
    y, a, ignored, invalid = facts
    rest, below, total_weight, mixed, squares = sums
    keep, spread, z_loss = numbers
    e_y = tl.math.exp2(e2_y)
    total = rest + e_y
    sure = (e_y >= rest) & (e_y > 0)
    above = log1p(rest / tl.where(e_y > 0, e_y, 1.0))
    logged = tl.log(total)
    x_y = e2_y * LN2
    nll = tl.where(sure, above, logged - x_y)
    log_sum = tl.where(sure, x_y + above, logged)
    cost = times(keep * w_y, nll)
    if way.smoothed:
        cost += times(spread, total_weight * log_sum + below)  # a tensor may be 0
    a = tl.where(invalid, float("nan"), a)
    lse = m + log_sum
    squared = times(times(z_loss, lse), lse)
    cost += squared
    # -sum_c p_c log p_c and log sum_c p_c^2 have full precision also if the target has nearly all probability.
    near = nll + LN2 * ((e2_y * rest - mixed) / total)
    far = log_sum - LN2 * ((mixed + times(e_y, tl.maximum(e2_y, FLOOR))) / total)
    entropy = tl.where(sure, near, far)
    square = e_y * e_y
    safe_square = tl.where(square > 0, square, 1.0)
    near = log1p(squares / safe_square) - 2 * nll
    of_squares = tl.where(sure & (square > 0), near, tl.log(squares + square) - 2 * log_sum)
    all_q = 1.0
    surprise = nll
    if q_sums is not None:
        all_q = q_sums[1]
        surprise = all_q * log_sum + q_sums[0]
    surprise = tl.where(invalid, float("nan"), surprise)
    right = tl.where((top_class == y) & ~invalid, 1.0, 0.0)
    loss, z_part = of_mean(a * cost, row, divisor), of_mean(a * squared, row, divisor)
    recorded = loss, lse, surprise, entropy, top_class, right, z_part, of_squares, mean_logit
    for index in tl.static_range(9):  # members of `Results`: 0 is the loss, 4 the predictions, 6 the z-loss
        skipped = excluded if index == 0 or index == 6 else ignored
        record(results[index], row, inside, tl.where(skipped, -1 if index == 4 else 0.0, recorded[index]))

    gamma = r * keep * w_y
    excess = r * 0
    delta = r * spread
    if way.smoothed:
        excess += r * spread * total_weight
    excess += times(2 * r * z_loss, lse)
    excess += optional(upstreams.lse, row, inside, 0.0)
    gamma += optional(upstreams.nll, row, inside, 0.0)
    if BARRED:
        gamma = tl.where(nll == float("inf"), 0.0, gamma)
    beta = 0.0
    if way.of_entropy:
        v = optional(upstreams.entropy, row, inside, 0.0)
        excess -= times(v, entropy)
        beta = -v
    factor = (gamma * all_q + excess) / total
    g_y = times(excess, e_y / total) - gamma * (rest / total) - delta * w_y
    log_factor = 0.0
    if way.of_entropy:
        factor -= times(beta, log_sum) / total
        log_factor = LN2 * beta / total
        g_y -= times(beta, times(e_y / total, nll))
    g_y *= slope(z_y, activation, way, True)
    return factor, log_factor, delta, g_y, gamma


@triton.jit
def of_mean(value, row, divisor):
    """Return what the loss of a row adds to a mean: 0 if the divisor is 0."""
    d = divisor + (row * 0).to(tl.float32)  # of the shape of the value
    return tl.where(d == 0, 0.0, tl.div_rn(value, tl.where(d == 0, 1.0, d)))


@triton.jit
def record(place, row, inside, value):
    """Store a result of a row or of a block of rows, unless `place` is null or None because it was not requested."""
    if place is not None:
        tl.store(place + row, value, mask=given_rows(place, inside))


@triton.jit
def record_nothing(row, inside, results):
    """Store the results of an ignored row, or of a block of rows."""
    for index in tl.static_range(9):
        record(results[index], row, inside, -1 if index == 4 else 0.0)
