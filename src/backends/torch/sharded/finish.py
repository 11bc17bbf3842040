"""Compute the loss, the statistics and the coefficients of the gradient from a row's merged sums.

With the row's factor r of the gradient, and upstream gradients u, n, v of lse, nll and entropy H::

    gamma = r (1-e) w_y + n        beta = -v        delta = r e/V
    alpha = gamma + r (e/V) W + 2 r zeta lse + u - v H
    g_c = p_c (alpha + beta log p_c) - gamma [c == y] - delta w_c

For class probabilities q::

    alpha = r sum_c w_c q'_c + n sum_c q_c + 2 r zeta lse + u - v H
    g_c = p_c (alpha + beta log p_c) - r w_c q'_c - n q_c

At the target, p_y - 1 is computed with expm1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.activation import slope
from xent.backends.torch.facts import Facts
from xent.backends.torch.job import Upstream
from xent.backends.torch.sharded.steps import Coefficients
from xent.backends.torch.sharded.sums import Merged
from xent.backends.torch.steps import times

__all__ = ["Known", "coefficients", "kept_names", "losses"]


class Known(NamedTuple):
    """The data of rows that their gradient needs, each (N,). The backward pass gets it from saved tensors."""

    peak: Tensor
    log_sum: Tensor
    log_p: Tensor | None = None
    """log p_y."""
    target: Tensor | None = None
    """z_y, the target's raw logit."""
    row_weight: Tensor | None = None
    """w_y; None without class weights."""
    total_weight: Tensor | None = None
    """W; None without class weights."""
    entropy: Tensor | None = None
    mass: Tensor | None = None
    given: Tensor | None = None


def kept_names(stats: list[str], probabilities: bool, weighted: bool) -> list[str]:
    """Return the names of the fields of `Known` that a call needs."""
    names = ["peak", "log_sum"]
    names += ["mass"] if probabilities else ["log_p", "target"]
    names += ["row_weight", "total_weight"] if weighted and not probabilities else []
    names += ["entropy"] if "entropy" in stats else []
    return [*names, *(["given"] if probabilities and "nll" in stats else [])]


def losses(merged: Merged, known: Known, facts: Facts, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return (losses, contributions of the z term to them, nll), each (R,). nll is 0 if it is not requested."""
    spec, weight = facts.spec, facts.weight[rows]
    spread = spec.label_smoothing / facts.vocabulary
    lse = merged.peak + merged.log_sum
    if merged.log_p is not None:
        nll = -merged.log_p
        keep = 1 - spec.label_smoothing
        cost = nll * keep if known.row_weight is None else times(known.row_weight * keep, nll)
        if keep == 0:
            cost = torch.zeros_like(nll)
        if merged.below is not None:
            total = facts.vocabulary if known.total_weight is None else known.total_weight
            cost = cost + spread * (total * merged.log_sum + merged.below)
    else:
        assert merged.cost is not None
        assert merged.mass is not None
        cost, nll = merged.cost + times(merged.mass, merged.log_sum), torch.zeros_like(lse)
        if merged.surprise is not None and merged.given is not None:
            nll = merged.surprise + times(merged.given, merged.log_sum)
    z_term = weight * spec.z_loss * lse.square()
    loss = weight * cost + z_term if spec.z_loss else weight * cost
    if facts.dead is not None:
        dead = facts.dead[rows]
        loss, z_term = loss.masked_fill(dead, 0), z_term.masked_fill(dead, 0)
    return loss, z_term, nll


def coefficients(known: Known, facts: Facts, rows: slice) -> Coefficients:
    """Return the coefficients of the rows' gradients, with the upstream gradients in `facts`."""
    spec, zero = facts.spec, None if facts.dead is None else facts.dead[rows]
    r = facts.scale[rows]
    of_lse, of_nll, of_entropy = (
        None if facts.upstream is None or one is None else one[rows] for one in (facts.upstream or Upstream())[1:]
    )
    if facts.support is not None:
        assert known.log_p is not None
        beyond = known.log_p == -torch.inf  # target outside of the support
        r, of_nll = r.masked_fill(beyond, 0), None if of_nll is None else of_nll.masked_fill(beyond, 0)
    lse = known.peak + known.log_sum
    excess = 2 * spec.z_loss * r * lse if spec.z_loss else torch.zeros_like(r)
    if of_lse is not None:
        excess = excess + of_lse
    beta = None
    if of_entropy is not None:
        assert known.entropy is not None
        beta = -of_entropy
        excess = excess + beta * known.entropy
    peak, log_sum = known.peak, known.log_sum
    if known.mass is not None:
        alpha = r * known.mass + excess
        if of_nll is not None:
            assert known.given is not None
            alpha = alpha + of_nll * known.given
        return Coefficients(peak, log_sum, alpha, beta, None, r, of_nll, None, zero)
    gamma = r * (1 - spec.label_smoothing)
    if known.row_weight is not None:
        gamma = gamma * known.row_weight
    if of_nll is not None:
        gamma = gamma + of_nll
    delta = None
    if spec.label_smoothing:
        delta = r * (spec.label_smoothing / facts.vocabulary)
        excess = excess + delta * (facts.vocabulary if known.total_weight is None else known.total_weight)
    target = _at_target(known, facts, rows, gamma, excess, beta, delta)
    return Coefficients(peak, log_sum, gamma + excess, beta, delta, None, None, target, zero)


def _at_target(
    known: Known, facts: Facts, rows: slice, gamma: Tensor, excess: Tensor, beta: Tensor | None, delta: Tensor | None
) -> Tensor:
    """Return the gradient (R,) with respect to each row's target logit."""
    assert known.log_p is not None
    assert known.target is not None
    p = known.log_p.exp()
    g = gamma * known.log_p.expm1() + p * excess
    if beta is not None:
        g = g + times(p, beta * known.log_p)
    if delta is not None:
        g = g - (delta if known.row_weight is None else delta * known.row_weight)
    made: Tensor = g * slope(known.target, facts.spec, None if facts.bend is None else facts.bend[rows])
    return made
