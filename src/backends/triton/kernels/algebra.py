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

`row` is the index of a row in the call, or a block of indices. `inside` is the mask of a block, None for one row.
`rows`, `upstreams` and `results` are the groups of `xent.backends.triton.launches`.
"""

import triton
import triton.language as tl

from xent.backends.triton.kernels.maths import FLOOR, LN2, log1p, slope, times

__all__ = [
    "activation_of",
    "finish",
    "gradient_factor",
    "load",
    "numbers_of",
    "of_row",
    "position",
    "record",
    "record_nothing",
    "row_at",
    "row_facts",
    "target_weight",
]


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
    if inside is None:
        return tl.load(place)
    else:
        return tl.load(place, mask=inside, other=other)


@triton.jit
def of_row(values, row, inside, other):
    """Load what each row has in `values` (N,), as float32. Rows outside of the mask have `other`."""
    return load(values + row, inside, other).to(tl.float32)


@triton.jit
def row_at(index, inside, rows):
    """Return the row at an index of the order in which rows are computed."""
    row = index
    if rows.order is not None:
        row = load(rows.order + index, inside, 0)
    return row


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
    a = tl.where(ignored, 0.0, 1.0)
    if rows.sample_weight is not None:
        a = tl.where(ignored, 0.0, of_row(rows.sample_weight, row, inside, 0.0))
    return y, a, ignored, invalid


@triton.jit
def target_weight(rows, y):
    """Return w_y, 1 without class weights, for targets y among the classes of this rank."""
    w_y = tl.where(y < 0, 1.0, 1.0)
    if rows.class_weight is not None:
        w_y = tl.load(rows.class_weight + y)
    return w_y


@triton.jit
def numbers_of(rows, vocabulary, numbers):
    """Return 1-e, e/V and z-loss: the numbers, or those of `rows.numbers`."""
    keep, spread, z_loss = numbers.keep, numbers.spread, numbers.z_loss
    if rows.numbers is not None:
        smoothing = tl.load(rows.numbers)
        keep = 1 - smoothing
        spread = tl.div_rn(smoothing, vocabulary.to(tl.float32))
        z_loss = tl.load(rows.numbers + 1)
    return keep, spread, z_loss


@triton.jit
def activation_of(row, inside, rows, numbers):
    """Return logit scale and softcap of a row, divided by its temperature: the numbers, or those of `rows.numbers`."""
    softcap, logit_scale = numbers.softcap, numbers.logit_scale
    if rows.numbers is not None:
        softcap = tl.load(rows.numbers + 2)
        logit_scale = tl.load(rows.numbers + 3)
    if rows.temperature is not None:
        temperature = of_row(rows.temperature, row, inside, 1.0)
        softcap = tl.div_rn(temperature * 0 + softcap, temperature)
        logit_scale = tl.div_rn(temperature * 0 + logit_scale, temperature)
    return logit_scale, softcap


@triton.jit
def gradient_factor(row, inside, a, invalid, rows, upstreams):
    """Return whether a row's loss and gradient are 0, and r; NaN for an invalid target.

    With upstream gradients of statistics, the loss has none if `upstreams.loss` is None. A row whose loss is 0 then has
    a gradient, for which r is 0.
    """
    STATISTICS: tl.constexpr = (upstreams.entropy is not None) or (
        (upstreams.lse is not None) or (upstreams.nll is not None)
    )
    dead = (a == 0) & ~invalid
    r = a
    if rows.divisor is not None:
        d = tl.load(rows.divisor + 1)
        dead = (tl.where(d == 0, 0.0, a) == 0) & ~invalid
        r = tl.div_rn(a, tl.where(d == 0, 1.0, d) + a * 0)
    r = tl.where(invalid, float("nan"), r)
    if upstreams.loss is not None:
        r *= of_row(upstreams.loss, row, inside, 0.0)
    elif STATISTICS:
        r = tl.where(invalid, float("nan"), 0.0)
    return dead, tl.where(dead, 0.0, r)


@triton.jit
def _entropy_of(mixed, rest, e_y, log2_e_y, nll, log_sum):
    """Return -sum_c p_c log p_c with full precision, also if the target has nearly all probability.

    `mixed` and `log2_e_y` are in units of log2.
    """
    total = rest + e_y
    near = nll + LN2 * ((log2_e_y * rest - mixed) / total)
    far = log_sum - LN2 * ((mixed + times(e_y, tl.maximum(log2_e_y, FLOOR))) / total)
    return tl.where((e_y >= rest) & (e_y > 0), near, far)


@triton.jit
def _log_of_squares(squares, rest, e_y, nll, log_sum):
    """Return log sum_c p_c^2 with full precision, also if the target has nearly all probability.

    `squares` is the sum of e^(2 (x_c - m)) over all classes except the target.
    """
    square = e_y * e_y
    sure = (e_y >= rest) & (square > 0)
    return tl.where(
        sure,
        log1p(squares / tl.where(sure, square, 1.0)) - 2 * nll,
        tl.log(squares + square) - 2 * log_sum,
    )


@triton.jit
def finish(
    row, inside, facts, dead, r, w_y, z_y, m, sums, e2_y, mean_logit, found, given, results, upstreams, numbers, bend,
    way: tl.constexpr, ENTROPY: tl.constexpr, BARRED: tl.constexpr = False,
):  # fmt: skip
    """Record the results of rows. Return factor, tilt, delta, the gradient of the target's raw logit, and gamma.

    The gradient of another class is (e^(x - m) (factor + tilt log2(e) (x - m)) - delta w) dx/dz.

    `sums` are rest, below, W, mixed and squares; `below` and W over all classes; those that no result needs may be 0.
    `mixed` and `e2_y`, the target's exponent, are in units of log2. `found` is the class of the largest x. `facts` are
    those of `row_facts`, `numbers` those of `numbers_of`. BARRED: a target without probability has no gradient.

    With class probabilities q, the loss is a [sum_c w'_c (lse - x_c) + zeta lse^2] for shares w' = w ((1-e) q + e/V).
    So no class is the target, 1-e is 0, and the shares are the class weights of a smoothing with e/V = 1. `given` are
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
    squared = 0.0
    if way.z_loss:
        squared = z_loss * lse * lse
        cost += squared
    entropy = 0.0
    if ENTROPY:
        entropy = _entropy_of(mixed, rest, e_y, e2_y, nll, log_sum)
    squared_probabilities = 0.0
    if results.log_sum_sq_probs is not None:
        squared_probabilities = _log_of_squares(squares, rest, e_y, nll, log_sum)
    all_q = 1.0
    surprise = nll
    if given is not None:
        all_q = given[1]
        surprise = all_q * log_sum + given[0]
    made = (
        tl.where(dead, 0.0, a * cost),
        tl.where(ignored, 0.0, lse),
        tl.where(ignored, 0.0, tl.where(invalid, float("nan"), surprise)),
        tl.where(ignored, 0.0, entropy),
        tl.where(ignored, -1, found).to(tl.int64),
        tl.where((found == y) & ~(ignored | invalid), 1.0, 0.0),
        tl.where(dead, 0.0, a * squared),
        tl.where(ignored, 0.0, squared_probabilities),
        tl.where(ignored, 0.0, mean_logit),
    )
    _record_all(row, inside, results, made)

    gamma = r * keep * w_y
    excess = r * 0
    delta = r * spread
    if way.smoothed:
        excess += r * spread * total_weight
    if way.z_loss:
        excess += 2 * r * z_loss * lse
    if upstreams.lse is not None:
        excess += of_row(upstreams.lse, row, inside, 0.0)
    if upstreams.nll is not None:
        gamma += of_row(upstreams.nll, row, inside, 0.0)
    if BARRED:
        gamma = tl.where(nll == float("inf"), 0.0, gamma)
    beta = 0.0
    if way.tilted:
        v = of_row(upstreams.entropy, row, inside, 0.0)
        excess -= v * entropy
        beta = -v
    factor = (gamma * all_q + excess) / total
    g_y = times(excess, e_y / total) - gamma * (rest / total) - delta * w_y
    tilt = 0.0
    if way.tilted:
        factor -= beta * log_sum / total
        tilt = LN2 * beta / total
        g_y -= beta * times(e_y / total, nll)
    if way.scaled or way.capped:
        g_y *= slope(z_y, bend, way, True)
    return factor, tilt, delta, g_y, gamma


@triton.jit
def record(place, row, inside, value):
    """Store a result of a row or of a block of rows, unless `place` is None because it was not requested."""
    if place is not None:
        if inside is None:
            tl.store(place + row, value)
        else:
            tl.store(place + row, value, mask=inside)


@triton.jit
def _record_all(row, inside, results, made):
    """Store results in the order of `xent.backends.triton.launches.Results`."""
    for index in tl.static_range(9):
        record(results[index], row, inside, made[index])


@triton.jit
def record_nothing(row, results):
    """Store the results of an ignored row."""
    _record_all(row, None, results, (0.0, 0.0, 0.0, 0.0, -1, 0.0, 0.0, 0.0, 0.0))
