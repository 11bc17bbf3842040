"""Compute losses, statistics and gradient coefficients from the sums over whole rows. Only this step handles options.

With x, e, w, a as in `xent.cross_entropy`, m the largest x, log_sum = log sum_c exp(x_c - m), t_c = [c==y] and
w_t = w_y for class indices, t_c = w_c q_c and w_t = 1 for class probabilities q::

    lse   = m + log_sum
    l     = a [ (1-e) w_t sum_c t_c (lse - x_c)  +  (e/V) sum_c w_c (lse - x_c)  +  zeta lse^2 ]
    dL/dx = p_c (alpha + beta log p_c) - gamma t_c - delta w_c

where r, u, n and v are the upstream gradients of l / a, lse, nll and entropy H::

    gamma = r (1-e) w_t + n     delta = r e/V     beta = -v
    alpha = gamma sum_c t_c + delta sum_c w_c + 2 r zeta lse + u - v H

For class probabilities with class weights, the term of n is computed by a second call without the weights.
"""

from collections.abc import Collection
from typing import NamedTuple

import mlx.core as mx

from xent.backends.mlx.devices import product
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.kernels import Results, RowFacts
from xent.core.call import Probabilities

__all__ = ["Coefficients", "Gap", "Sums", "coefficients", "finish", "reduced", "statistics"]


class Gap(NamedTuple):
    """A weighted sum over classes of how far x is below the largest x, and the sum of the weights."""

    below: mx.array
    """(R,) sum_c weight_c (peak - x_c)."""
    total: mx.array | float = 1
    """sum_c weight_c, (R,) or 0-d."""

    def surprise(self, log_sum: mx.array) -> mx.array:
        """Return sum_c weight_c (-log p_c), (R,)."""
        return self.below + (log_sum if isinstance(self.total, int) else self.total * log_sum)


class Sums(NamedTuple):
    """Sums of R rows over classes. They use differences to the largest x, which keep their precision."""

    peak: mx.array
    """(R,) the largest x."""
    log_sum: mx.array
    """(R,) log sum_c exp(x_c - peak)."""
    target: Gap
    """Gap with weights t."""
    classes: Gap | None = None
    """Gap with weights w, if there is label smoothing."""
    plain: Gap | None = None
    """Gap with weights q, if that is not t and the nll is needed."""
    expected: mx.array | None = None
    """(R,) sum_c p_c (peak - x_c)."""
    best: mx.array | None = None
    """(R,) int32: the class of the largest logit_scale * z."""
    squares: mx.array | None = None
    """(R,) sum_c p_c^2."""
    mean: mx.array | None = None
    """(R,) the mean of x_c."""


class Coefficients(NamedTuple):
    """The coefficients (R,) of the gradient with respect to raw logits. They include the factor s of dx/dz."""

    alpha: mx.array
    gamma: mx.array
    beta: mx.array | None
    delta: mx.array | None
    rest: mx.array | None
    """alpha - gamma for class indices, computed before rounding: if p_y is near 1, the difference would cancel."""


def finish(sums: Sums, facts: RowFacts, asked: Collection[str]) -> Results:
    """Return the results of whole rows, without gradients."""
    log_sum, lse, weight = sums.log_sum, sums.peak + sums.log_sum, _target_weight(facts)
    surprise = sums.target.surprise(log_sum)
    loss = surprise if weight is None else product(weight, surprise)
    if sums.classes is not None:
        loss = loss + facts.number("spread") * sums.classes.surprise(log_sum)
    if facts.terms.z_loss:
        loss = loss + facts.number("z_loss") * mx.square(lse)
    made = {
        "loss": mx.where(facts.dead, 0, facts.weight * loss),
        "norm": mx.stack([sums.peak, log_sum], axis=-1),
        "nll": (sums.plain or sums.target).surprise(log_sum) if "nll" in asked else None,
        "entropy": None if sums.expected is None else sums.expected + log_sum,
        "predictions": sums.best,
        "log_sum_sq_probs": None if sums.squares is None else mx.log(sums.squares),
        "mean_logit": sums.mean,
    }
    return {name: value for name, value in made.items() if value is not None}


def coefficients(facts: RowFacts, lse: mx.array | None, total: mx.array | float) -> Coefficients:
    """Return the coefficients for the upstream gradients in the facts.

    `lse` (R,) is needed only for the z-loss; `total` is sum_c t_c.
    """

    def scaled(values: mx.array) -> mx.array:
        return values * facts.of_rows("logit_scale") if facts.terms.scale else values

    r, given = scaled(facts.scale), facts.upstream
    weight, beta, delta, rest = _target_weight(facts), None, None, list[mx.array]()
    gamma = r if weight is None else r * weight
    if facts.terms.smoothing:
        delta = r * facts.number("spread")
        rest.append(delta * facts.number("total_weight"))
    if facts.terms.z_loss and lse is not None:
        rest.append(2 * facts.number("z_loss") * r * lse)
    if "nll" in given:
        gamma = gamma + scaled(given["nll"])
    if "lse" in given:
        rest.append(scaled(given["lse"]))
    if "entropy" in given:
        beta = -scaled(given["entropy"])
        rest.append(beta * given["H"])
    more = sum(rest[1:], rest[0]) if rest else None
    alpha = gamma if facts.target is not None else gamma * total
    return Coefficients(alpha if more is None else alpha + more, gamma, beta, delta, more)


def _target_weight(facts: RowFacts) -> mx.array | None:
    """Return (1-e) w_t, (R,) or 0-d; None for 1."""
    keep = 1 - facts.number("label_smoothing") if facts.terms.smoothing else None
    if facts.target is None or facts.class_weight is None:
        return keep
    weight = facts.class_weight[facts.target]
    return weight if keep is None else keep * weight


def reduced(values: mx.array, facts: Facts) -> mx.array:
    """Reduce values (N,) of rows by the reduction of the call: to 0-d, or for "none" return them unchanged."""
    if facts.call.options.reduction == "none":
        return values
    total = values.sum()
    return total if facts.divisor is None else mx.where(facts.divisor == 0, 0, total / facts.divisor)


def statistics(found: Results, facts: Facts) -> dict[str, mx.array]:
    """Return the statistics that the options name, (N,) or 0-d."""
    ignored, rows, options = facts.ignored, facts.rows, facts.call.options
    made: dict[str, mx.array] = {}
    for name in options.stats:
        if name == "count":
            made[name] = facts.counted
        elif name == "z_loss":
            factor = rows.number("z_loss")
            term = rows.weight * factor * mx.square(_lse(found))
            made[name] = reduced(mx.where(rows.dead | (factor == 0), 0, term), facts)
        elif name == "accuracy":
            correct = mx.equal(found["predictions"], _truth(facts)) & ~ignored
            correct = correct if facts.invalid is None else correct & ~facts.invalid
            right = correct.astype(found["loss"].dtype)
            made[name] = right if options.accuracy_of_rows else right.sum() / mx.maximum(facts.counted, 1)
        else:
            value = _lse(found) if name == "lse" else found[name]
            value = mx.where(ignored, -1 if name == "predictions" else 0, value)
            made[name] = value if name != "nll" or facts.invalid is None else mx.where(facts.invalid, mx.nan, value)
    return made


def _lse(found: Results) -> mx.array:
    peak, log_sum = found["norm"][:, 0], found["norm"][:, 1]
    return mx.where(peak == -mx.inf, peak, peak + log_sum)


def _truth(facts: Facts) -> mx.array:
    """Return the target class of each row, (N,); for class probabilities the most probable class."""
    target = facts.call.target
    if not isinstance(target, Probabilities):
        assert facts.rows.target is not None
        return facts.rows.target
    best = mx.argmax(target.values, axis=-1).astype(mx.int32)
    return best if target.order is None else best[mx.maximum(target.order, 0)]
