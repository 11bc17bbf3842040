"""Divergences from a teacher and their gradients, in MLX's own operations.

See `xent.backends.torch.portable.divergence` for the sums. Invalid values of a top-k teacher make a row NaN.
"""

from collections.abc import Callable

import mlx.core as mx

from xent.backends.mlx.devices import class_sum, exact_exp
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.kernels import Results, activate
from xent.backends.mlx.sources import Loaded, Logits
from xent.core.arrays import dtype_name
from xent.core.call import Dense, Given, Options, TopK, array_of
from xent.core.spec import mass_tolerance

__all__ = ["Divergences", "Known", "known_classes"]

Known = tuple[mx.array, mx.array]
"""The classes (N, K) of a top-k teacher, V outside of [0, V) and negative for padding entries; log-probabilities."""


class Divergences:
    """The steps of a call's rows: see `xent.backends.mlx.driver`. The teacher is dense or has known classes."""

    def __init__(self, facts: Facts, teacher: Logits | None, known: Known | None) -> None:
        self._facts, self._teacher, self._known = facts, teacher, known

    def forward(self, loaded: Loaded, part: slice, wanted: bool) -> Results:
        """Return the results of some rows, with the gradient of their logits. MLX computes it only if it is needed."""
        return self._rows(self._facts, loaded, part)

    def backward(self, facts: Facts, found: Results) -> Callable[[Loaded, slice], mx.array]:
        """Return the function that computes the gradient of the logits of some rows."""
        return lambda loaded, part: self._rows(facts, loaded, part)["grad"]

    def _rows(self, facts: Facts, loaded: Loaded, part: slice) -> Results:
        rows, call = facts.block(part), facts.call
        x, slope = rows.activate(loaded.logits)
        loss, derivative = self._divergence(loaded, part, x)
        found = {"loss": mx.where(rows.dead, 0, loss * rows.weight)}
        if call.options.stats:
            log_p, p = _softmax(x)
            found["entropy"] = mx.where(facts.idle[part], 0, 0 - class_sum(mx.where(p == 0, 0, p * log_p)))
        factor = (rows.scale * rows.number("logit_scale"))[:, None]
        grad = mx.where(rows.dead[:, None], 0, derivative * (factor if slope is None else factor * slope))
        dtype = array_of(call).dtype
        # A gradient is rounded to float16 only after the upstream gradient is multiplied in.
        found["grad"] = grad if dtype == mx.float16 and isinstance(call.source, Given) else grad.astype(dtype)
        return found

    def _divergence(self, loaded: Loaded, part: slice, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return the divergence (R,) and its derivative (R, V) with respect to x."""
        target, options = self._facts.call.target, self._facts.call.options
        if isinstance(target, Dense):
            assert self._teacher is not None
            z = self._teacher.load(part, [loaded.rows]).logits.astype(x.dtype)
            return _full(options, x, activate(z, target.activation.logit_scale, target.activation.softcap)[0])
        assert isinstance(target, TopK)
        assert self._known is not None
        ids, log_q = (values[part] for values in self._known)
        ids = mx.where((ids < 0) | self._facts.rows.dead[part, None], x.shape[-1], ids)
        return _from_top_k(options.kind, x, ids, log_q, target)


def known_classes(teacher: TopK, vocabulary: int, acc: mx.Dtype) -> tuple[Known, mx.array]:
    """Return the classes of a prepared teacher, and the rows (N,) with invalid values."""
    given, log_q = teacher.ids.astype(mx.int64), teacher.log_probs.astype(acc)
    none = -1 - mx.arange(given.shape[1], dtype=mx.int64)
    ids = mx.where(log_q == -mx.inf, none, mx.where((given < 0) | (given >= vocabulary), vocabulary, given))
    ordered, mass = mx.sort(ids, axis=-1), mx.exp(log_q).sum(-1)
    wrong = (
        (ids == vocabulary).any(-1) | (ordered[:, 1:] == ordered[:, :-1]).any(-1) | ~(mass <= 1 + _tolerance(teacher))
    )
    return (ids, log_q), wrong | (mass == 0) if teacher.tail == "renormalize" else wrong


def _tolerance(teacher: TopK) -> float:
    """Return how far rounding may raise the sum of probabilities above 1."""
    return mass_tolerance(dtype_name(teacher.log_probs))


def _full(options: Options, x: mx.array, t: mx.array) -> tuple[mx.array, mx.array]:
    """Return the divergence (R,) of full distributions, and its derivative (R, V) with respect to x."""
    beta, (log_p, p), (log_q, q) = options.beta, _softmax(x), _softmax(t)
    if options.kind == "tv":
        return class_sum(mx.abs(p - q)) / 2, _pulled(p, mx.sign(p - q) / -2)
    if beta == 0:
        return class_sum(_gaps(q, p, log_p - log_q)), p - q
    apart = log_q - log_p
    if beta == 1:
        return class_sum(_gaps(p, q, apart)), _pulled(p, apart)
    acc = x.dtype
    share = mx.where(apart > 0, mx.array(1 - beta, acc), mx.array(beta, acc))
    common = mx.log1p(share * mx.expm1(-mx.abs(apart)))
    from_p, from_q = common + mx.maximum(apart, 0), common - mx.minimum(apart, 0)
    m = (1 - beta) * p + beta * q
    found = beta * class_sum(_gaps(q, m, from_q)) + (1 - beta) * class_sum(_gaps(p, m, from_p))
    return found, _pulled(p, from_p) * (1 - beta)


def _from_top_k(kind: str, x: mx.array, ids: mx.array, log_q: mx.array, teacher: TopK) -> tuple[mx.array, mx.array]:
    """Return the divergence (R,) from K classes of each row, and its derivative (R, V). Entries with id V are none."""
    vocabulary, tail = x.shape[-1], teacher.tail
    known = (log_q != -mx.inf) & (ids < vocabulary)
    log_p, p = _softmax(x)
    if tail == "renormalize":
        log_q = log_q - _log_sum_exp(log_q)[:, None]
    q = mx.where(known, exact_exp(log_q), 0)
    mass, safe = class_sum(q), mx.minimum(ids, vocabulary - 1)
    log_p_k, p_k = (mx.take_along_axis(values, safe, -1) for values in (log_p, p))
    if tail != "bucket" and kind == "kl":
        found = mx.where(known, q * (log_q - log_p_k), 0).sum(-1)
        return found, _put(p * mass[:, None], ids, p_k * mass[:, None] - q)
    # All other classes are one more cell. Their shares of it do not depend on the teacher.
    others = _put(x, ids, mx.full(ids.shape, -mx.inf, x.dtype))
    empty = mx.max(others, axis=-1) == -mx.inf
    others = mx.where(empty[:, None], 0, others)
    log_shares, shares = _softmax(others)
    log_sum_left, log_sum = others.max(-1) - log_shares.max(-1), x.max(-1) - log_p.max(-1)
    log_p_left = mx.where(empty, -mx.inf, log_sum_left - log_sum)
    left = mx.maximum(1 - mass, 0) if tail == "bucket" else mx.zeros_like(mass)
    # The remaining mass is only rounding if no other class can have it.
    left = mx.where(empty & (left <= _tolerance(teacher)), 0, left)
    p, q = _cells(mx.where(known, p_k, 0), exact_exp(log_p_left)), _cells(q, left)
    if kind == "tv":
        found, derivative = class_sum(mx.abs(p - q)) / 2, _pulled(p, mx.sign(p - q) / -2)
    else:
        apart = _cells(mx.where(known, log_p_k - log_q, 0), log_p_left - mx.log(left))
        found = class_sum(_gaps(q, p, apart)) + (mass + left - 1)
        derivative = p * (mass + left)[:, None] - q
    return found, _put(derivative[:, -1:] * shares, ids, derivative[:, :-1])


def _cells(of_ids: mx.array, left: mx.array) -> mx.array:
    """Return values (R, K + 1) of K classes, and of the others as one more."""
    return mx.concatenate([of_ids, left[:, None]], axis=-1)


def _log_sum_exp(x: mx.array) -> mx.array:
    """Return log sum_c exp(x_c), (R,). On the CPU MLX's own is computed in float32 for every dtype."""
    largest = mx.max(x, axis=-1, keepdims=True)
    return largest[:, 0] + mx.log(class_sum(exact_exp(x - largest)))


def _softmax(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return log p and p; p is more accurate than the exponential of the rounded log p."""
    y = x - mx.max(x, axis=-1, keepdims=True)
    e = exact_exp(y)
    total = class_sum(e)[:, None]
    return y - mx.log(total), e / total


def _put(values: mx.array, ids: mx.array, new: mx.array) -> mx.array:
    """Return values (R, V) with new ones (R, K) at the classes `ids`; id V is ignored."""
    wide = mx.concatenate([values, mx.zeros((len(values), 1), values.dtype)], axis=-1)
    return mx.put_along_axis(wide, ids, new.astype(values.dtype), axis=-1)[:, : values.shape[-1]]


def _gaps(w: mx.array, o: mx.array, u: mx.array) -> mx.array:
    """Return w (e^u - 1 - u) for o = w e^u, computed as o - w - w u if e^u is large; o where w is 0."""
    near = mx.minimum(u, 1)
    gap = mx.where(u > 1, o - w - w * u, w * mx.maximum(mx.expm1(near) - near, 0))
    return mx.where(w == 0, o, gap)


def _pulled(p: mx.array, u: mx.array) -> mx.array:
    """Return p (sum_c p_c u_c - u), 0 where p is 0; see `refold` in `xent.backends.torch.portable.divergence`."""
    u = u - mx.take_along_axis(u, mx.argmax(p, axis=-1, keepdims=True), -1)
    mean = class_sum(mx.where(p == 0, 0, p * u))[:, None]
    return mx.where(p == 0, 0, p * (mean - u))
