"""A block of rows: sums over their classes, and their gradient, in MLX's own operations.

`fold` computes the sums, from which `xent.backends.mlx.kernels` computes losses and coefficients. `gradient` computes,
from the coefficients::

    p     = softmax(x)     one operation, the only pass with exponentials
    dL/dz = [ p_c (alpha + beta log p_c) - gamma [c==y] - r w'_c - n q_c ] dx/dz
    dx/dz = s / cosh(s z / k)^2   with softcap k,   s   without;   the coefficients include s

For a class index, the target's element p_y alpha - gamma is computed as gamma (p_y - 1) + excess p_y.

`FusedBlock` is faster for class indices on a GPU. It uses `mlx.core.fast.cross_entropy`, which returns the loss
b = lse - x_y; its gradient for an upstream gradient alpha is alpha (p - [c==y]). So::

    lse   = b + x_y
    dL/dx = alpha (p - [c==y]) + excess [c==y] - r w'_c

If the target's logit is also given before rounding, b and the target's p are corrected for the difference.
"""

from collections.abc import Collection
from dataclasses import replace

import mlx.core as mx

from xent.backends.mlx.devices import class_sum, device_type, exp, expm1, has_fused_loss, product
from xent.backends.mlx.kernels import Coefficients, Facts, Sums, coefficients, ordered
from xent.core.spec import Scalar

__all__ = ["Block", "FusedBlock", "fuses", "needs_memory", "ranks"]

_ADDED = 4096  # classes that MLX's softmax adds accurately


def ranks(z: mx.array, facts: Facts) -> mx.array:
    """Return the number (R,) of logits (R, V) that are larger than the target's. NaN is the largest logit."""
    order = ordered(z, facts.number("logit_scale")) if facts.scales else z
    if facts.ids is not None:
        order = mx.where(facts.ids < 0, -mx.inf, order)
    assert facts.target is not None
    of_target = mx.take_along_axis(order, facts.target[:, None], -1)
    return (~(order <= of_target) & ~mx.isnan(of_target)).sum(-1).astype(mx.int32)


class Block:
    """R rows of raw logits z (R, V). With supports x of padding entries is -inf, and all x of invalid rows are NaN."""

    def __init__(self, z: mx.array, facts: Facts) -> None:
        self.z, self.facts, self.acc = z, facts, facts.weight.dtype
        self.fast = self.acc != mx.float64 and device_type() == "cpu" and facts.sets is None
        """Whether MLX's softmax is accurate. It is not on a GPU."""
        self.apart = facts.target is not None and self.acc != mx.float64 and not self.fast
        """Whether `_softmax` omits the target from p, because its p is more accurate when computed from log_sum."""
        self.x, self._slope = self._activations()
        if facts.sets is not None:
            # A target outside of its support has no gradient.
            outside, upstream = self._at_target(self.x) == -mx.inf, dict(facts.upstream)
            if "nll" in upstream:
                upstream["nll"] = mx.where(outside, 0, upstream["nll"])
            self.facts = replace(facts, scale=mx.where(outside, 0, facts.scale), upstream=upstream)
        self._q: Scalar = None if facts.probabilities is None else facts.probabilities.astype(self.acc)
        self._shares: Scalar = self._q
        """w': (R, V), (V,) or 0-d."""
        self._mass: Scalar = None
        self._given: Scalar = None
        if facts.smooths:
            spread = facts.number("spread")
            self._shares = spread if self._q is None else (1 - facts.number("label_smoothing")) * self._q + spread
            self._mass = spread * facts.number("total_weight")
        if self._shares is not None and facts.class_weight is not None:
            self._shares = self._shares * facts.class_weight
        if self._q is not None and self._shares is not None:
            self._given = class_sum(self._q)
            self._mass = self._given if self._shares is self._q else class_sum(self._shares)
        self._p: mx.array | None = None
        self._sum_of_p: mx.array | None = None
        """The sum (R,) of MLX's softmax, if its difference from 1 matters; otherwise None."""

    def fold(self, requested: Collection[str]) -> Sums:
        """Return the sums of the rows."""
        largest, cost, statistics = self._largest(), None, dict[str, mx.array]()
        peak = self._finite(largest)
        below = peak[:, None] - self.x
        self._p, log_sum = self._softmax(peak)
        p = self._p
        if self.apart:
            p = self._with_target(p, exp(-(self._below_target(peak) + log_sum)))
        elif self._sum_of_p is not None:
            p = p / self._sum_of_p[:, None]
        if self._shares is not None:
            by_class = self._shares.ndim > 0
            cost = class_sum(product(self._shares, below)) if by_class else product(self._shares, class_sum(below))
        if self._q is None:
            nll = self._below_target(peak) + log_sum
        else:
            surprise: Scalar = cost if self._shares is self._q else class_sum(product(self._q, below))
            nll = surprise + self._given * log_sum
        if "nll" in requested:
            statistics["nll"] = nll
        if "entropy" in requested:
            statistics["entropy"] = class_sum(product(p, below)) + log_sum
        if "predictions" in requested:
            statistics["predictions"] = self._best()
        if "rank" in requested:
            statistics["rank"] = ranks(self.z, self.facts)
        if "log_sum_sq_probs" in requested:
            statistics["log_sum_sq_probs"] = mx.log(class_sum(mx.square(p)))
        if "mean_logit" in requested:
            statistics["mean_logit"] = self._mean()
        return Sums(largest, log_sum, nll, cost, self._mass, statistics)

    def _coefficients(self, lse: mx.array | None) -> Coefficients:
        return coefficients(self.facts, lse, self._mass, self._given)

    def gradient(self, peak: mx.array, log_sum: mx.array) -> mx.array:
        """Return the gradient with respect to z."""
        coefs, peak = self._coefficients(peak + log_sum), self._finite(peak)
        log_p = (self.x - peak[:, None]) - log_sum[:, None]  # MLX computes it only if it is needed
        p = exp(log_p) if self._p is None else self._p
        if self._q is coefs.excess is coefs.beta is None and not self.apart and self._p is not None:
            # If p_y is near 1 the whole gradient is small: subtract 1 before any product is rounded. In one array.
            less = p.at[mx.arange(len(p)), self.facts.target].add(-1)
            return self._finished(less * coefs.gamma[:, None], coefs)
        grad = p * coefs.alpha[:, None]
        if coefs.beta is not None:
            grad = grad + product(p, coefs.beta[:, None] * log_p)
        if self._q is None:
            grad = self._with_target(grad, self._bracket(coefs, peak, log_sum))
        return self._finished(grad, coefs)

    def target_gradient(self, norm: mx.array) -> mx.array:
        """Return the gradient with respect to class probabilities, in which the loss is linear.

        With the upstream gradients r of l / a and n of the nll: (r (1-e) w_c + n) (-log p_c), exactly 0 if the first
        factor is 0.
        """
        facts, log_p = self.facts, (self.x - norm[:, :1]) - norm[:, 1:]
        factor = (facts.scale * (1 - facts.number("label_smoothing")))[:, None]
        if facts.class_weight is not None:
            factor = factor * facts.class_weight
        if "nll" in facts.upstream:
            factor = factor + facts.upstream["nll"][:, None]
        return product(mx.where(facts.excluded[:, None], 0, -factor), log_p)

    def _largest(self) -> mx.array:
        """Return the largest x (R,)."""
        return self.x.max(-1)

    def _finite(self, peak: mx.array) -> mx.array:
        """Return a reference for the x of rows with a largest x, 0 for empty supports."""
        return peak if self.facts.sets is None else mx.where(peak == -mx.inf, 0, peak)

    def _with_target(self, array: mx.array, new: mx.array) -> mx.array:
        """Return values (R, V) with new ones (R,) for the target."""
        return mx.put_along_axis(array, self._index(), new[:, None], -1)

    def _below_target(self, peak: mx.array) -> mx.array:
        """Return peak - x_y (R,)."""
        return peak - self._at_target(self.x)

    def _best(self) -> mx.array:
        """Return the class of the largest scaled logit."""
        key = self.z
        if self.facts.scales:
            key = ordered(key, self.facts.number("logit_scale"))
        ids, none = self.facts.ids, mx.iinfo(mx.int32).max
        if ids is None:
            return mx.argmax(key, axis=-1).astype(mx.int32)
        key = mx.where(ids < 0, -mx.inf, mx.where(mx.isnan(key), mx.inf, key))
        best = mx.where((ids >= 0) & (key == key.max(-1, keepdims=True)), ids, none).min(-1)
        return mx.where(best == none, 0, best)

    def _mean(self) -> mx.array:
        """Return the mean of x (R,); 0 for empty supports."""
        ids, x = self.facts.ids, self.x.astype(self.acc)
        if ids is None:
            return class_sum(x) / float(x.shape[-1])
        return class_sum(mx.where((ids < 0) & (x == -mx.inf), 0, x)) / mx.maximum((ids >= 0).sum(-1), 1)

    def _finished(self, grad: mx.array, coefs: Coefficients) -> mx.array:
        """Return the gradient with respect to z, 0 in excluded rows, from that with respect to x without shares."""
        if self._shares is not None:
            grad = grad - coefs.share[:, None] * self._shares
        if coefs.given is not None:
            grad = grad - coefs.given[:, None] * self._q
        if self._slope is not None:
            grad = grad * self._slope
        if self.facts.sets is not None:
            grad = mx.where(self.x == -mx.inf, 0, grad)
        if not self.facts.excluded_are_finite:
            grad = mx.where(self.facts.excluded[:, None], 0, grad)
        return grad.astype(self.z.dtype)

    def _bracket(self, coefs: Coefficients, peak: mx.array, log_sum: mx.array) -> mx.array:
        """Return the target's element of the gradient (R,), without shares."""
        log_p = -(self._below_target(peak) + log_sum)
        p = exp(log_p)
        bracket: mx.array = coefs.gamma * expm1(log_p)
        if coefs.excess is not None:
            bracket = bracket + product(coefs.excess, p)
        return bracket if coefs.beta is None else bracket + product(p, coefs.beta * log_p)

    def _activations(self) -> tuple[mx.array, mx.array | None]:
        """Return x, and with a softcap its slope; computed as 1 - tanh^2 the slope would cancel."""
        x, facts = self.z.astype(self.acc), self.facts
        if facts.target_logits is not None:
            x = self._with_target(x, facts.target_logits)
        x, slope = facts.activate(x)
        if facts.ids is not None and facts.sets is not None:
            x = mx.where(facts.ids < 0, mx.where(facts.sets[:, 0] < 0, mx.nan, -mx.inf)[:, None].astype(x.dtype), x)
        return x, slope

    def _index(self) -> mx.array:
        """Return the class indices (R, 1) of the targets."""
        assert self.facts.target is not None
        return self.facts.target[:, None]

    def _at_target(self, array: mx.array) -> mx.array:
        """Return the target's element (R,) of values (R, V)."""
        return mx.take_along_axis(array, self._index(), -1)[:, 0]

    def _softmax(self, peak: mx.array) -> tuple[mx.array, mx.array]:
        """Return p, with 0 for the target if it is `apart`, and log sum_c exp(x_c - peak) (R,)."""
        if self.fast:
            p = mx.softmax(self.x, axis=-1, precise=True)
            log_sum = -mx.log(p.max(-1))
            if p.shape[-1] <= _ADDED:
                return p, log_sum
            # MLX's softmax divided by an inaccurate long sum. The sum of p shows the error.
            self._sum_of_p = class_sum(p)
            return p, log_sum + mx.log(self._sum_of_p)
        powers = exp(self.x - peak[:, None])
        if not self.apart:
            total = class_sum(powers)
            if self.facts.sets is not None:
                total = mx.where(total == 0, 1, total)
            return powers / total[:, None], mx.log(total)
        # Sum the other classes separately: beside the target's 1, small probabilities would be rounded away.
        power, powers = exp(-self._below_target(peak)), self._with_target(powers, mx.zeros_like(peak))
        rest = class_sum(powers)
        total = rest + power
        total = total if self.facts.sets is None else mx.where(total == 0, 1, total)
        return powers / total[:, None], mx.where(power == 1, mx.log1p(rest), mx.log(total))


def fuses(z: mx.array, facts: Facts) -> bool:
    """Whether the fused operations can compute these rows. For float32 their exponentials are not accurate enough."""
    served = facts.target is not None and facts.sets is None and "entropy" not in facts.upstream
    return served and z.dtype.size < 4 and has_fused_loss()


def needs_memory(facts: Facts) -> bool:
    """Whether a float32 copy of the logits is needed: only if x differs from them, or all classes are summed."""
    return facts.smooths or facts.caps or facts.scales or facts.sets is not None


class FusedBlock(Block):
    """R rows of raw logits z with class indices. Its peak is the lse, and its log_sum 0."""

    _passed: tuple[mx.array, mx.array] | None = None
    _rounded: mx.array
    """(R,) lse - x_y, for the target logits x_y of the block."""

    def fold(self, requested: Collection[str]) -> Sums:
        """Return the sums of the rows. If alpha is known before, the gradient is computed in the same pass."""
        self.apart = False
        if "grad" in requested and not self.facts.squares:
            self._rounded = self._pass(self._coefficients(None))[0]
        else:
            self._rounded = self._loss(self.x)
        return super().fold(requested)

    def _largest(self) -> mx.array:
        """Return lse in place of the largest x."""
        return self._rounded + self._at_target(self.x).astype(self.acc)

    def _below_target(self, peak: mx.array) -> mx.array:
        """Return lse - x_y (R,)."""
        return self._exact(self._rounded)

    def _softmax(self, peak: mx.array) -> tuple[mx.array, mx.array]:
        return mx.exp(self.x - peak[:, None]), mx.zeros_like(peak)

    def gradient(self, peak: mx.array, log_sum: mx.array) -> mx.array:
        """Return the gradient with respect to z."""
        coefs = self._coefficients(peak + log_sum)
        rounded, grad = self._pass(coefs)
        more = coefs.excess
        if self.facts.target_logits is not None and not needs_memory(self.facts):
            taken = coefs.alpha * (mx.expm1(-self._exact(rounded)) - mx.expm1(-rounded))
            more = taken if more is None else taken + more
        if more is not None:
            grad = grad.at[mx.arange(len(grad)), self.facts.target].add(more.astype(grad.dtype))
        return self._finished(grad, coefs)

    def _activations(self) -> tuple[mx.array, mx.array | None]:
        return super()._activations() if needs_memory(self.facts) else (self.z, None)

    def _loss(self, x: mx.array) -> mx.array:
        """Return lse - x_y (R,), accumulated in float32."""
        loss: mx.array = mx.fast.cross_entropy(x, self._index()[:, 0])
        return loss

    def _exact(self, rounded: mx.array) -> mx.array:
        """Return lse - x_y (R,), corrected for the rounding of the target logits x_y."""
        target_logits = self.facts.target_logits
        if target_logits is None or needs_memory(self.facts):
            return rounded
        above = target_logits - self._at_target(self.x).astype(self.acc)
        return rounded - above + mx.log1p(mx.exp(-rounded) * mx.expm1(above))

    def _pass(self, coefs: Coefficients) -> tuple[mx.array, mx.array]:
        """Return lse - x_y (R,) and the gradient alpha (p - [c==y]) (R, V), computed once."""
        if self._passed is None:
            (rounded,), (grad,) = mx.vjp(self._loss, [self.x], [coefs.alpha])
            self._passed = rounded, grad
        return self._passed
