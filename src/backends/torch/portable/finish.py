"""The one `finish` of PyTorch: losses, statistics and coefficients of the gradient from the merged sums of rows.

With the sums of `xent.backends.torch.contract` relative to `peak`, the row's gradient factor r, and upstream gradients
u, n, v of lse, nll and entropy H::

    own = e^(x_y - peak)      total = rest + own      lse = peak + log total      nll = log(1 + rest / own)
    H   = (rest log total - mixed + own nll) / total
    gamma = r (1-e) w_y + n         excess = r (e/V) W + 2 r zeta lse + u - v H          beta = -v / total
    alpha = (gamma + excess + v log total) / total
    at_target = (own excess - rest gamma - v own log p_y) / total - r (e/V) w_y

For class probabilities q, gamma is r sum_c w'_c + n sum_c q_c, and every class is one of the others.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Setting
from xent.backends.torch.portable.activation import activate, factor, slope
from xent.backends.torch.portable.facts import Facts, Index, at, times
from xent.backends.torch.portable.workspace import Coefficients
from xent.core.call import Activation

__all__ = ["Finished"]

_SMALLEST_OWN = 1e-19  # rest / own is finite above: rest is below 2^60


class Finished:
    """R rows with merged sums, (R,) each."""

    def __init__(self, setting: Setting, facts: Facts, sums: dict[str, Tensor], index: Index) -> None:
        self._setting, self._facts, self._sums, self._index = setting, facts, sums, index
        self._rest = sums["rest"]
        self._total, self._own, self._beyond = self._rest, None, None
        self._nll: Tensor | None = None
        if "target" in sums:
            self._activation = self._at_rows(facts.activation)
            x_y = sums["target"]
            if not facts.plain:
                x_y = x_y.clone()
                activate(x_y, self._activation)
            distance = x_y - sums["peak"]
            own = distance.exp()
            if facts.support is not None:
                assert facts.target is not None
                classes, valid, _ = facts.support.of(index)
                self._beyond = ~((classes == at(facts.target, index)[:, None]) & valid).any(-1)
                own.masked_fill_(self._beyond, 0)
            self._own, self._total = own, self._rest + own
            self.log_sum = self._total.log()
            near = self._rest.div(own).log1p_()
            nll = self._nll = torch.where(own > _SMALLEST_OWN, near, self.log_sum - distance)
            self._nll = nll if self._beyond is None else nll.masked_fill(self._beyond, torch.inf)
        else:
            self.log_sum = self._total.log()
        self._lse: Tensor | None = None

    def _at_rows(self, given: Activation) -> Activation:
        return given if given.temperature is None else given._replace(temperature=at(given.temperature, self._index))

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of x, (R,)."""
        if self._lse is None:
            self._lse = self._sums["peak"] + self.log_sum
        return self._lse

    def entropy(self) -> Tensor:
        """Return the entropy, 0 without any class."""
        own, sums = self._own, self._sums
        found = self._rest * self.log_sum - sums["mixed"]
        if own is not None and self._nll is not None:
            found = found + times(own, self._nll)
        found = found / self._total
        return found if self._beyond is None else found.masked_fill(self._total == 0, 0)

    def results(self) -> dict[str, Tensor]:
        """Return the losses, and what the statistics need, by name."""
        options, sums, facts = self._setting.call.options, self._sums, self._facts
        stats, weight = options.stats, at(facts.weight, self._index)
        found, loss = dict[str, Tensor](), self._cost()
        loss = loss if weight is None else weight * loss
        no_z = not isinstance(options.z_loss, Tensor) and options.z_loss == 0
        if not no_z or "z_loss" in stats:
            z_term = times(options.z_loss, self.lse.square())
            z_term = z_term if weight is None else z_term * weight
            found["z_loss"], loss = z_term, loss if no_z else loss + z_term
        found["loss"] = loss
        if "lse" in stats:
            found["lse"] = self.lse
        if "nll" in stats:
            nll = self._nll
            found["nll"] = sums["surprise"] + times(sums["given"], self.log_sum) if nll is None else nll.clone()
        if "entropy" in stats:
            found["entropy"] = self.entropy()
        if "place" in sums:
            found["predictions"] = sums["place"]
        if "truth" in sums:
            found["truth"] = sums["truth"]
        if "squares" in sums:
            squares = sums["squares"] if self._own is None else sums["squares"] + self._own.square()
            of_square = squares.log() - 2 * self.log_sum
            none = self._beyond is not None
            found["log_sum_sq_probs"] = of_square.masked_fill(self._total == 0, -torch.inf) if none else of_square
        if "deficit" in sums:
            found["mean_logit"] = sums["peak"] - sums["deficit"] / sums["counted"].clamp(min=1)
            if self._beyond is not None:
                found["mean_logit"].masked_fill_(sums["counted"] == 0, 0)
        return found

    def _cost(self) -> Tensor:
        """Return the losses without row weights and z-loss."""
        sums, smoothing = self._sums, self._setting.call.options.label_smoothing
        if self._nll is None:
            return sums["cost"] + times(sums["mass"], self.log_sum)
        w_y = sums.get("row_weight")
        keep = 1 - smoothing if w_y is None else w_y * (1 - smoothing)
        cost = times(keep, self._nll)
        if "below" in sums:
            others = sums["below"] + sums["weights"] * self.log_sum
            cost = cost + smoothing / self._setting.vocabulary * (others + times(1 if w_y is None else w_y, self._nll))
        return cost

    def coefficients(self) -> Coefficients:
        """Return the coefficients of the gradient, with the upstream gradients in the facts."""
        facts, sums, options = self._facts, self._sums, self._setting.call.options
        linear = factor(self._at_rows(facts.activation))
        r = _scaled(at(facts.scale, self._index), linear)
        of_lse, of_nll, of_entropy = (
            None if one is None else _scaled(at(one, self._index), linear) for one in facts.upstream[1:]
        )
        if self._beyond is not None:
            r = self._each(r).masked_fill(self._beyond, 0)
            of_nll = None if of_nll is None else of_nll.masked_fill(self._beyond, 0)
        zero, invalid = at(facts.dead, self._index), None
        if self._beyond is not None:
            invalid = at(facts.invalid, self._index)
        excess: Any = of_lse
        if isinstance(options.z_loss, Tensor) or options.z_loss != 0:
            excess = _plus(excess, 2 * options.z_loss * r * self.lse)
        beta = move = None
        if of_entropy is not None:
            excess = _plus(excess, -of_entropy * self.entropy())
            beta, move = -of_entropy / self._total, of_entropy * self.log_sum
        peak, total = sums["peak"], self._total
        if self._own is None:
            gamma = r * sums["mass"]
            gamma = gamma if of_nll is None else gamma + of_nll * sums["given"]
            alpha = _plus(_plus(gamma, excess), move) / total
            return Coefficients(peak, alpha, beta, None, self._each(r), of_nll, None, zero)
        w_y, delta = sums.get("row_weight"), None
        gamma = r if "below" not in sums else r * (1 - options.label_smoothing)
        gamma = gamma if w_y is None else gamma * w_y
        gamma = _plus(gamma, of_nll)
        if "below" in sums:
            delta = self._each(r * (options.label_smoothing / self._setting.vocabulary))
            excess = _plus(excess, delta * (sums["weights"] + (1 if w_y is None else w_y)))
        alpha = gamma / total if isinstance(gamma, Tensor) else total.reciprocal().mul_(gamma)
        g_y = alpha.mul(self._rest).neg_()
        if excess is not None:
            g_y = g_y + self._own / total * excess
        if beta is not None and self._nll is not None:
            g_y = g_y - times(self._own, beta * self._nll)
        if delta is not None:
            g_y = g_y - (delta if w_y is None else delta * w_y)
        bent = slope(sums["target"], self._activation)
        g_y = g_y if bent is None else g_y * bent
        more = _plus(excess, move)
        alpha = alpha if more is None else (gamma + more) / total
        return Coefficients(peak, alpha, beta, delta, None, None, g_y, zero, invalid)

    def _each(self, value: Any) -> Tensor:
        """Return a coefficient as (R,)."""
        if isinstance(value, Tensor):
            return value.expand_as(self._total)
        return torch.full_like(self._total, value)


def _plus(one: Any, other: Any) -> Any:
    """Return the sum of two coefficients; None stands for 0."""
    if one is None or other is None:
        return one if other is None else other
    return one + other


def _scaled(values: Any, linear: Any) -> Any:
    """Return values times logit_scale / temperature."""
    return values if not isinstance(linear, Tensor) and linear == 1 else values * linear
