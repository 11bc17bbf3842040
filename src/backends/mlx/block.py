"""A block of rows in MLX's own operations, as they are right on every device and fast on the CPU.

For a block of raw logits z, with x, e, w, a as in `xent.cross_entropy`, r the row's factor of the gradient, m the
largest x and q' what multiplies -log p (w_c q'_c for probabilities; split in (1-e) w_y [c==y] and (e/V) w_c for class
indices)::

    p     = softmax(x)                     one operation, the only pass with exponentials
    lse   = m + log_sum,   log_sum = -log(max p)
    l     = a [ (1-e) w_y (m - x_y + log_sum) + (e/V) sum_c w_c (m - x_c + log_sum) + zeta lse^2 ]
    dl/dx = r [ ((1-e) w_y + more) (p - [c==y]) + more [c==y] - (e/V) w_c ],   more = (e/V) sum_c w_c + 2 zeta lse
    dx/dz = s / cosh(s z / k)^2   with softcap k,   s   without

Differences to m are taken before anything is added up, so that logits far from 0 lose nothing.
"""

import math

import mlx.core as mx

from xent.backends.mlx.devices import device_type
from xent.backends.mlx.kernels import Asked, Found, RowFacts

__all__ = ["Block", "product"]


class Block:
    """R rows of raw logits z."""

    def __init__(self, z: mx.array, facts: RowFacts) -> None:
        self.z, self.facts, self.terms = z, facts, facts.terms
        self.acc = facts.weight.dtype
        self.smoothing, self.z_loss, self.softcap, self.scale, self.spread, self.total_weight = facts.numbers[:6]
        self.target = None if facts.target is None else facts.target[:, None]
        self.x, self.slope = self._activations()

    def forward(self, asked: Asked) -> Found:
        """Return the losses and what else is asked for."""
        x, facts = self.x, self.facts
        peak = x.max(-1)
        p, log_sum = self._softmax(peak)
        below = peak[:, None] - x
        share = self._share()
        if self.target is None:
            loss = product(share, below).sum(-1) + share.sum(-1) * log_sum
        else:
            loss = product(share[:, 0], self._below_target(peak) + log_sum)
            if self.terms.smoothing:
                gaps = below if facts.class_weight is None else product(facts.class_weight, below)
                loss = loss + self.spread * (gaps.sum(-1) + self.total_weight * log_sum)
        if self.terms.z_loss:
            loss = loss + self.z_loss * mx.square(peak + log_sum)
        return Found(
            loss=mx.where(facts.dead, 0, facts.weight * loss),
            grad=self._gradient(p, share, peak, log_sum, self._target_apart()) if asked.grad else None,
            norm=mx.stack([peak, log_sum], axis=-1) if asked.norm else None,
            nll=self._nll(peak, below, log_sum) if asked.nll else None,
            entropy=self._entropy_of(p, below, log_sum) if asked.entropy else None,
            predictions=self._predictions() if asked.predictions else None,
        )

    def backward(self, norm: mx.array) -> mx.array:
        """Return the gradient from the norm (R, 2)."""
        peak, log_sum = norm[:, 0], norm[:, 1]
        p = _exp((self.x - peak[:, None]) - log_sum[:, None])
        return self._gradient(p, self._share(), peak, log_sum, exact=True)

    def _activations(self) -> tuple[mx.array, mx.array | None]:
        """Return x (R, V), and with a softcap its slope, which 1 - tanh^2 would lose to cancellation."""
        x, facts = self.z.astype(self.acc), self.facts
        if facts.target_logits is not None and self.target is not None:
            x = mx.put_along_axis(x, self.target, facts.target_logits[:, None], -1)
        if self.terms.scale:
            x = x * self.scale
        if not self.terms.softcap:
            return x, None
        inside = x / self.softcap
        return self.softcap * mx.tanh(inside), 1 / mx.square(mx.cosh(inside))

    def _classes(self) -> mx.array:
        """Return the targets (R, 1) of rows that have class indices."""
        assert self.target is not None
        return self.target

    def _at_target(self, values: mx.array) -> mx.array:
        """Return each row's element (R,) of (R, V) values."""
        return mx.take_along_axis(values, self._classes(), -1)[:, 0]

    def _place(self) -> tuple[mx.array, mx.array]:
        """Return the indices of the targets in (R, V)."""
        return mx.arange(len(self.x)), self._classes()[:, 0]

    def _share(self) -> mx.array:
        """Return what multiplies -log p of the target, (R, 1), for indices; of each class, (R, V), for probabilities.

        Smoothing's (e/V) w_c is in the latter and not in the former.
        """
        facts, keep = self.facts, 1 - self.smoothing
        if self.target is None:
            assert facts.probabilities is not None
            share = facts.probabilities.astype(self.acc)
            if self.terms.smoothing:
                share = share * keep + self.spread
            return share if facts.class_weight is None else share * facts.class_weight
        if facts.class_weight is None:
            return mx.broadcast_to(keep, self.target.shape)
        return keep * facts.class_weight[self.target]

    def _below_target(self, peak: mx.array) -> mx.array:
        """Return m - x_y (R,)."""
        return peak - self._at_target(self.x)

    def _nll(self, peak: mx.array, below: mx.array, log_sum: mx.array) -> mx.array:
        if self.target is not None:
            return self._below_target(peak) + log_sum
        assert self.facts.probabilities is not None
        given = self.facts.probabilities.astype(self.acc)
        return product(given, below).sum(-1) + given.sum(-1) * log_sum

    def _predictions(self) -> mx.array:
        """Return the class of the largest logit before the softcap, which keeps the order but may make ties."""
        z = mx.sign(self.scale).astype(self.z.dtype) * self.z if self.terms.scale else self.z
        return mx.argmax(z, axis=-1).astype(mx.int32)

    def _target_apart(self) -> bool:
        """Whether `_softmax` leaves the target out of p, since its own comes better from log_sum."""
        return self.target is not None and self.acc != mx.float64 and device_type() == "gpu"

    def _softmax(self, peak: mx.array) -> tuple[mx.array, mx.array]:
        """Return p (R, V), 0 for the target where `_target_apart`, and log sum_c exp(x_c - peak) (R,)."""
        if self.acc != mx.float64 and device_type() == "cpu":
            p = mx.softmax(self.x, axis=-1, precise=True)
            return p, -mx.log(p.max(-1))
        powers = _exp(self.x - peak[:, None])  # rougher on a GPU in MLX's own softmax
        if not self._target_apart():
            total = powers.sum(-1)
            return powers / total[:, None], mx.log(total)
        # The others apart: a sum with the target's 1 would round away what a sure row has left.
        power = _exp(-self._below_target(peak))
        powers = powers.at[self._place()].multiply(0)
        rest = powers.sum(-1)
        total = rest + power
        return powers / total[:, None], mx.where(power == 1, mx.log1p(rest), mx.log(total))

    def _entropy_of(self, p: mx.array, below: mx.array, log_sum: mx.array) -> mx.array:
        found = product(p, below).sum(-1) + log_sum
        if not self._target_apart():
            return found
        below_y = self._at_target(below)
        return found + product(mx.exp(-(below_y + log_sum)), below_y)

    def _gradient(self, p: mx.array, share: mx.array, peak: mx.array, log_sum: mx.array, exact: bool) -> mx.array:
        """Return the gradient with respect to z; `exact` where log_sum says more of the target's p than p does."""
        facts = self.facts
        factor = facts.scale * self.scale if self.terms.scale else facts.scale
        total, more = share.sum(-1), None
        if self.target is not None and self.terms.smoothing:
            more = self.spread * self.total_weight
        if self.terms.z_loss:
            squared = 2 * self.z_loss * (peak + log_sum)
            more = squared if more is None else more + squared
        if more is not None:
            total = total + more
        if self.target is None:
            grad = p * (factor * total)[:, None] - factor[:, None] * share
        else:
            # Where p_y is near 1 the whole row is small: p_y - 1 comes before any product is rounded.
            if more is None and not exact:
                grad = p.at[self._place()].add(-1) * (factor * total)[:, None]
            else:
                log_p_y = -(self._below_target(peak) + log_sum)
                bracket = share[:, 0] * _expm1(log_p_y)
                if more is not None:
                    bracket = bracket + product(more, _exp(log_p_y))
                grad = p * (factor * total)[:, None]
                grad = mx.put_along_axis(grad, self._classes(), (factor * bracket)[:, None], -1)
            if self.terms.smoothing:
                each = (factor * self.spread)[:, None]
                grad = grad - (each if facts.class_weight is None else each * facts.class_weight)
        if self.slope is not None:
            grad = grad * self.slope
        if not facts.finite:
            grad = mx.where(facts.dead[:, None], 0, grad)
        return grad.astype(self.z.dtype)


def _exp(x: mx.array) -> mx.array:
    """Return exp(x); MLX's own has no more than float32's precision even for float64."""
    return mx.power(mx.array(math.e, dtype=mx.float64), x) if x.dtype == mx.float64 else mx.exp(x)


def _expm1(x: mx.array) -> mx.array:
    """Return exp(x) - 1."""
    return _exp(x) - 1 if x.dtype == mx.float64 else mx.expm1(x)


def product(weights: mx.array, values: mx.array) -> mx.array:
    """Multiply; what has no weight is 0, even where the value is infinite."""
    return mx.where(weights == 0, 0, weights * values)
