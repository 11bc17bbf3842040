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

from dataclasses import dataclass

import mlx.core as mx

from xent.backends.mlx.kernels import Asked, Found, RowFacts

__all__ = ["Coefficients", "Gap", "Sums", "coefficients", "finish", "product"]


@dataclass(frozen=True, eq=False)
class Gap:
    """A weighted sum over classes of how far x is below the largest x, and the sum of the weights."""

    below: mx.array
    """(R,) sum_c weight_c (peak - x_c)."""
    total: mx.array | float = 1
    """sum_c weight_c, (R,) or 0-d."""

    def surprise(self, log_sum: mx.array) -> mx.array:
        """Return sum_c weight_c (-log p_c), (R,)."""
        return self.below + (log_sum if isinstance(self.total, int) else self.total * log_sum)


@dataclass(frozen=True, eq=False)
class Sums:
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
    best: tuple[mx.array, mx.array] | None = None
    """(R,) the largest logit_scale * z, and (R,) int32 its class."""
    squares: mx.array | None = None
    """(R,) sum_c p_c^2."""
    level: Gap | None = None
    """Gap with weights 1; infinite if all logits are -inf."""


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The coefficients (R,) of the gradient with respect to raw logits. They include the factor s of dx/dz."""

    alpha: mx.array
    gamma: mx.array
    beta: mx.array | None
    delta: mx.array | None
    rest: mx.array | None
    """alpha - gamma for class indices, computed before rounding: if p_y is near 1, the difference would cancel."""


def finish(sums: Sums, facts: RowFacts, asked: Asked) -> Found:
    """Return the results of whole rows, without gradients."""
    log_sum, lse, weight = sums.log_sum, sums.peak + sums.log_sum, _target_weight(facts)
    surprise = sums.target.surprise(log_sum)
    loss = surprise if weight is None else product(weight, surprise)
    if sums.classes is not None:
        loss = loss + facts.number("spread") * sums.classes.surprise(log_sum)
    if facts.terms.z_loss:
        loss = loss + facts.number("z_loss") * mx.square(lse)
    return Found(
        loss=mx.where(facts.dead, 0, facts.weight * loss),
        norm=mx.stack([sums.peak, log_sum], axis=-1) if asked.norm else None,
        nll=(sums.plain or sums.target).surprise(log_sum) if asked.nll else None,
        entropy=None if sums.expected is None else sums.expected + log_sum,
        predictions=None if sums.best is None else sums.best[1],
        log_sum_sq_probs=None if sums.squares is None else mx.log(sums.squares),
        mean_logit=None if sums.level is None else sums.peak - sums.level.below / sums.level.total,
    )


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


def product(weights: mx.array, values: mx.array) -> mx.array:
    """Return weights * values; 0 for a weight of 0, also if the value is infinite."""
    return mx.where(weights == 0, 0, weights * values)


def _target_weight(facts: RowFacts) -> mx.array | None:
    """Return (1-e) w_t, (R,) or 0-d; None for 1."""
    keep = 1 - facts.number("label_smoothing") if facts.terms.smoothing else None
    if facts.target is None or facts.class_weight is None:
        return keep
    weight = facts.class_weight[facts.target]
    return weight if keep is None else keep * weight
