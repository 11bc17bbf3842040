"""A block of rows in MLX's own operations, for every device; on a GPU `fused` is faster for class indices.

`fold` computes sums over the classes. `xent.backends.mlx.finish` computes losses and coefficients from them, and
`gradient` computes, from the coefficients::

    p     = softmax(x)     one operation, the only pass with exponentials
    dL/dz = [ p_c (alpha + beta log p_c) - gamma t_c - delta w_c ] dx/dz
    dx/dz = s / cosh(s z / k)^2   with softcap k,   s   without;   the coefficients include s

For a class index, the target's element p_y alpha - gamma is computed as gamma (p_y - 1) + (alpha - gamma) p_y.
"""

import mlx.core as mx

from xent.backends.mlx.devices import device_type
from xent.backends.mlx.elementwise import exp, expm1
from xent.backends.mlx.finish import Coefficients, Gap, Sums, product
from xent.backends.mlx.kernels import Asked, RowFacts

__all__ = ["Block"]

_ADDED = 4096  # classes that are added one after the other
_TOGETHER = 64  # values of a node of the tree that adds more classes


class Block:
    """R rows of raw logits z (R, V)."""

    def __init__(self, z: mx.array, facts: RowFacts) -> None:
        self.z, self.facts = z, facts
        self.acc = facts.weight.dtype
        self.target = None if facts.target is None else facts.target[:, None]
        self.x, self._slope = self._activations()
        self._given = None if facts.probabilities is None else facts.probabilities.astype(self.acc)
        self._shares = self._given
        if self._given is not None and facts.class_weight is not None:
            self._shares = self._given * facts.class_weight
        self._p: mx.array | None = None
        self._sum_of_p: mx.array | None = None
        """The sum (R,) of MLX's softmax, if its difference from 1 matters; otherwise None."""

    def fold(self, asked: Asked) -> Sums:
        """Return the sums of the rows."""
        facts, x = self.facts, self.x
        peak = x.max(-1)
        below = peak[:, None] - x
        self._p, log_sum = self._softmax(peak)
        plain = None
        if self._shares is None:
            target = Gap(self._below_target(peak))
        else:
            target = _gap(self._shares, below)
            if asked.nll and self._given is not None and self._given is not self._shares:
                plain = _gap(self._given, below)
        return Sums(
            peak=peak,
            log_sum=log_sum,
            target=target,
            classes=self._classes(below) if facts.terms.smoothing else None,
            plain=plain,
            expected=self._expected(self._p, below, log_sum, peak) if asked.entropy else None,
            best=self._best() if asked.predictions else None,
            squares=self._squares(self._p, log_sum, peak) if asked.log_sum_sq_probs else None,
            level=self._level(below, peak) if asked.mean_logit else None,
        )

    def total(self) -> mx.array | float:
        """Return sum_c t_c."""
        return 1 if self._shares is None else _class_sum(self._shares)

    def gradient(self, given: Coefficients, peak: mx.array, log_sum: mx.array) -> mx.array:
        """Return the gradient with respect to z."""
        exact = self._p is None or self._target_apart()
        log_p = (self.x - peak[:, None]) - log_sum[:, None] if self._p is None or given.beta is not None else None
        p = exp(log_p) if self._p is None and log_p is not None else self._p
        assert p is not None
        if self._shares is None and given.rest is None and given.beta is None and not exact:
            # If p_y is near 1 the whole gradient is small: subtract 1 before any product is rounded.
            grad = p.at[self._place()].add(-1) * given.gamma[:, None]
        else:
            grad = p * given.alpha[:, None]
            if given.beta is not None and log_p is not None:
                grad = grad + product(p, given.beta[:, None] * log_p)
            if self._shares is not None:
                grad = grad - given.gamma[:, None] * self._shares
            else:
                grad = mx.put_along_axis(grad, self._index(), self._bracket(given, peak, log_sum)[:, None], -1)
        return self._finished(grad, given.delta)

    def _finished(self, grad: mx.array, delta: mx.array | None) -> mx.array:
        """Return the gradient with respect to z, 0 in dead rows, from that with respect to x without the delta term."""
        if delta is not None:
            weight = self.facts.class_weight
            grad = grad - (delta[:, None] if weight is None else delta[:, None] * weight)
        if self._slope is not None:
            grad = grad * self._slope
        if not self.facts.finite:
            grad = mx.where(self.facts.dead[:, None], 0, grad)
        return grad.astype(self.z.dtype)

    def _bracket(self, given: Coefficients, peak: mx.array, log_sum: mx.array) -> mx.array:
        """Return the target's element of the gradient (R,), without the delta term."""
        log_p = -(self._below_target(peak) + log_sum)
        p = exp(log_p)
        found = given.gamma * expm1(log_p)
        if given.rest is not None:
            found = found + product(given.rest, p)
        return found if given.beta is None else found + product(p, given.beta * log_p)

    def _activations(self) -> tuple[mx.array, mx.array | None]:
        """Return x, and with a softcap its slope; computed as 1 - tanh^2 the slope would cancel."""
        x, known = self.z.astype(self.acc), self.facts.target_logits
        if known is not None and self.target is not None:
            x = mx.put_along_axis(x, self.target, known[:, None], -1)
        return self.facts.activate(x)

    def _index(self) -> mx.array:
        """Return the class indices (R, 1) of the targets."""
        assert self.target is not None
        return self.target

    def _place(self) -> tuple[mx.array, mx.array]:
        """Return the indices of the targets in (R, V)."""
        return mx.arange(len(self.z)), self._index()[:, 0]

    def _at_target(self, values: mx.array) -> mx.array:
        """Return the target's element (R,) of values (R, V)."""
        return mx.take_along_axis(values, self._index(), -1)[:, 0]

    def _below_target(self, peak: mx.array) -> mx.array:
        """Return m - x_y (R,)."""
        return peak - self._at_target(self.x)

    def _classes(self, below: mx.array) -> Gap:
        """Return the gap of all classes, with class weights."""
        weight = self.facts.class_weight
        return Gap(_class_sum(below), float(below.shape[-1])) if weight is None else _gap(weight, below)

    def _best(self) -> tuple[mx.array, mx.array]:
        """Return the largest scaled logit and its class. A softcap is not applied, because rounding could make ties."""
        z = self.z
        if self.facts.terms.scale:
            z = mx.sign(self.facts.number("logit_scale")).astype(z.dtype) * z
        return z.max(-1), mx.argmax(z, axis=-1).astype(mx.int32)

    def _target_apart(self) -> bool:
        """Whether `_softmax` omits the target from p, because its p is more accurate when computed from log_sum."""
        return self.target is not None and self.acc != mx.float64 and device_type() == "gpu"

    def _softmax(self, peak: mx.array) -> tuple[mx.array, mx.array]:
        """Return p (R, V), with 0 for the target if `_target_apart`, and log sum_c exp(x_c - peak) (R,)."""
        if self.acc != mx.float64 and device_type() == "cpu":
            p = mx.softmax(self.x, axis=-1, precise=True)
            log_sum = -mx.log(p.max(-1))
            if p.shape[-1] <= _ADDED:
                return p, log_sum
            # MLX's softmax divided by an inaccurate long sum. The sum of p shows the error.
            self._sum_of_p = _class_sum(p)
            return p, log_sum + mx.log(self._sum_of_p)
        powers = exp(self.x - peak[:, None])  # MLX's softmax is less accurate on a GPU
        if not self._target_apart():
            total = powers.sum(-1)
            return powers / total[:, None], mx.log(total)
        # Sum the other classes separately: beside the target's 1, small probabilities would be rounded away.
        power = exp(-self._below_target(peak))
        powers = powers.at[self._place()].multiply(0)
        rest = powers.sum(-1)
        total = rest + power
        return powers / total[:, None], mx.where(power == 1, mx.log1p(rest), mx.log(total))

    def _expected(self, p: mx.array, below: mx.array, log_sum: mx.array, peak: mx.array) -> mx.array:
        """Return sum_c p_c (peak - x_c) (R,)."""
        found = _class_sum(product(p, below))
        if not self._target_apart():
            return found if self._sum_of_p is None else found / self._sum_of_p
        below_y = self._below_target(peak)
        return found + product(mx.exp(-(below_y + log_sum)), below_y)

    def _squares(self, p: mx.array, log_sum: mx.array, peak: mx.array) -> mx.array:
        """Return sum_c p_c^2 (R,)."""
        found = _class_sum(mx.square(p))
        if not self._target_apart():
            return found if self._sum_of_p is None else found / mx.square(self._sum_of_p)
        return found + mx.square(mx.exp(-(self._below_target(peak) + log_sum)))

    def _level(self, below: mx.array, peak: mx.array) -> Gap:
        """Return the gap of all classes, each with weight 1."""
        return Gap(mx.where(peak == -mx.inf, mx.inf, _class_sum(below)), float(below.shape[-1]))


def _class_sum(values: mx.array) -> mx.array:
    """Return the sum over the last axis. On a CPU sum a tree, because MLX's sequential sum loses precision."""
    if values.shape[-1] <= _ADDED or device_type() != "cpu":
        return values.sum(-1)
    while (count := values.shape[-1]) > _TOGETHER:
        whole = count // _TOGETHER * _TOGETHER
        parts = values[..., :whole].reshape(*values.shape[:-1], -1, _TOGETHER).sum(-1)
        values = parts if whole == count else mx.concatenate([parts, values[..., whole:].sum(-1, keepdims=True)], -1)
    return values.sum(-1)


def _gap(weight: mx.array, below: mx.array) -> Gap:
    """Return the gap of classes with these weights, (C,) or (R, V)."""
    return Gap(_class_sum(product(weight, below)), _class_sum(weight))
