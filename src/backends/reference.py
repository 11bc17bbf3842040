"""The reference implementation in float64 NumPy, which defines every option. All other backends are tested against it.

It is written to be compared with the formulas, not to be fast. As backend "numpy" it serves NumPy arrays (values only,
no autograd). `gradients` returns the analytic gradients, which tests verify by finite differences.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from xent.backends.reference_divergence import Array, between, expectation, from_top_k
from xent.core.call import (
    Activation,
    Allowed,
    Call,
    Dense,
    Given,
    Largest,
    Options,
    Probabilities,
    Source,
    TopK,
    without_temperature,
)
from xent.core.spec import ROW_STATS, BackendInfo, Scalar, Stats
from xent.core.validate import check_support, check_targets, check_temperature

__all__ = ["BACKEND", "Reference", "gradients"]

_Results = tuple[Array | np.float64, Stats]
_quiet = np.errstate(invalid="ignore", over="ignore", divide="ignore")
"""Rows without a loss may hold any numbers."""


class Reference:
    """Backend "numpy": every call on NumPy arrays, in float64."""

    name = "numpy"
    framework = "numpy"
    native_to: tuple[str, ...] = ()
    missing = None

    def info(self) -> BackendInfo:
        """Report NumPy's version."""
        return BackendInfo(self.name, self.framework, True, None, {"numpy": np.__version__}, ("cpu",))

    def refuse(self, call: Call) -> str | None:
        """Refuse only `inplace`, because there is no gradient to write."""
        if isinstance(call.source, Given) and call.source.inplace:
            return "inplace=True reuses the logits for their gradient, and NumPy arrays get no gradient"
        return None

    @_quiet
    def run(self, call: Call) -> _Results:
        """Return loss and statistics as float64."""
        if call.options.heads is not None:
            return _combined(call, [self.run(head_call) for head_call in _apart(call)])
        rows = _RowFormulas(call)
        return rows.reduced(rows.loss), rows.stats()

    @_quiet
    def top_k(self, call: Call) -> tuple[Array, Array]:
        """Return ids and float64 log-probabilities (..., K), most probable first."""
        call, z = without_temperature(call), _raw(call.source)
        assert isinstance(call.target, Largest)
        rows, activation = z.reshape(-1, z.shape[-1]), call.activation
        order = _ordered(rows, activation.logit_scale)
        ids = np.argsort(np.where(np.isnan(order), -np.inf, -order), axis=-1, kind="stable")[:, : call.target.k]
        x = _activated(rows, activation)[0]
        lse, surprise = _normalized(x)
        log_probs = np.where((x == -np.inf) & ~np.isnan(lse[:, None]), -np.inf, -surprise)
        shape = (*z.shape[:-1], call.target.k)
        return ids.reshape(shape), np.take_along_axis(log_probs, ids, -1).reshape(shape)


BACKEND = Reference()


@_quiet
def gradients(call: Call, upstream: ArrayLike = 1.0, **others: Array) -> dict[str, Array]:
    """Return the gradients by argument: "logits", or "input", "linear_weight" and "linear_bias" (given or not).

    Class probabilities have one as "target". `upstream` is the upstream gradient of the loss; `others` are those of
    lse, nll and entropy.
    """
    source, target, options = call.source, call.target, call.options
    if options.heads is not None:
        upstreams = np.asarray(upstream) * (1 if options.reduction == "none" else np.asarray(_factors(options)))
        parts = [
            gradients(head_call, upstream_of_head, **{name: per_head[head] for name, per_head in others.items()})
            for head, (head_call, upstream_of_head) in enumerate(zip(_apart(call), upstreams, strict=True))
        ]
        stacked = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
        return {name: stack if name == "input" else stack.sum(0) for name, stack in stacked.items()}
    rows = _RowFormulas(call)
    grad = rows.gradient(upstream, others)
    if isinstance(source, Given):
        grads = {"logits": grad}
    else:
        hidden, weight = _float64(source.input), _float64(source.weight)
        # Rows without a gradient contribute nothing, even if their hidden states are NaN.
        flat = np.where(grad.any(-1, keepdims=True), hidden.reshape(-1, weight.shape[1]), 0.0)
        grads = {"input": (grad @ weight).reshape(hidden.shape), "linear_weight": grad.T @ flat}
        grads["linear_bias"] = grad.sum(0)
    if isinstance(target, Probabilities):
        # The last rows of a sequence, which have no target, have no gradient either.
        grads["target"] = np.roll(rows.target_gradient(upstream, others.get("nll")), options.shift, 0)
    for name in grads.keys() & {"logits", "target"}:
        grads[name] = np.moveaxis(grads[name].reshape(*rows.shape, rows.p.shape[-1]), -1, _axis(source))
    return grads


def _apart(call: Call) -> list[Call]:
    """Return one call per head. Head j predicts target t + shift[j] from row t of its own hidden states."""
    source, options = call.source, call.options
    assert not isinstance(source, Given)
    assert isinstance(options.shift, tuple)
    shifts = options.shift
    if "accuracy" in options.stats and "count" not in options.stats:
        options = options._replace(stats=(*options.stats, "count"))
    return [
        call._replace(
            source=source._replace(input=source.input[head]),
            options=options._replace(shift=shift, heads=None, head_weight=None),
        )
        for head, shift in enumerate(shifts)
    ]


def _factors(options: Options) -> Sequence[Scalar]:
    """Return the factor of each head's reduced loss, of which the loss is the sum."""
    return options.head_weight or (1,) * (options.heads or 1)


def _combined(call: Call, parts: Sequence[_Results]) -> _Results:
    """Combine the losses and statistics of one call per head."""
    losses, stats = zip(*parts, strict=True)
    each_row, weights = call.options.reduction == "none", np.asarray(_factors(call.options))
    combined: dict[str, Array] = {}
    for name in call.options.stats:
        per_head = np.stack([getattr(of_head, name) for of_head in stats])
        if name in ROW_STATS or (name == "z_loss" and each_row):
            combined[name] = per_head
        elif name == "accuracy":
            counts = np.stack([of_head.count for of_head in stats])
            combined[name] = per_head @ counts / max(counts.sum(), 1)
        else:
            combined[name] = weights @ per_head if name == "z_loss" else per_head.sum()
    return np.stack(losses) if each_row else weights @ np.stack(losses), Stats(**combined)


class _RowFormulas:
    """N rows of raw logits z (N, V), and all quantities in the formulas of the public functions.

    Row t of a shifted call has the target and weight at t + shift.
    """

    def __init__(self, call: Call) -> None:
        call = without_temperature(call)
        target, activation, self.options = call.target, call.activation, call.options
        options, shift, z = self.options, self.options.shift, _raw(call.source)
        assert isinstance(shift, int)
        assert not isinstance(target, Largest)
        self.shape, vocabulary = z.shape[:-1], z.shape[-1]
        count, length = int(np.prod(self.shape)), self.shape[-1] if shift else 0
        positions = np.arange(length) + shift

        def moved(per_target: ArrayLike | None) -> Array:
            """Return the values (N, ...) of the rows, from those of the targets (..., T, ...); ones for None."""
            per_target = np.ones(self.shape) if per_target is None else np.asarray(per_target)
            if shift:
                per_target = np.take(per_target, np.minimum(positions, max(length - 1, 0)), axis=len(self.shape) - 1)
            return np.asarray(per_target.reshape(count, *per_target.shape[len(self.shape) :]))

        self.ignored = np.broadcast_to(positions >= length if shift else False, self.shape).reshape(count)
        self.class_weight = np.ones(vocabulary) if options.weight is None else _float64(options.weight)
        weight, row_weight = _float64(moved(options.sample_weight)), np.ones(count)
        self.outside = None
        """(N, V): the mask of the classes that are not in each row's support, or None."""
        self.q = np.zeros((count, vocabulary))
        if isinstance(target, Probabilities):
            self.q = _float64(moved(np.moveaxis(np.asarray(target.probs), _axis(call.source), -1)))
        elif isinstance(target, Dense | TopK):
            self.ignored = self.ignored | (weight == 0)
        else:
            ids = moved(target.ids)
            if activation.temperature is not None:
                check_temperature(
                    np.asarray(activation.temperature), np.asarray(target.ids), options.ignore_index, shift
                )
            check_targets(np.asarray(target.ids), vocabulary, options.ignore_index, shift)
            self.ignored = self.ignored | (ids == options.ignore_index)
            ids = np.where(self.ignored, 0, ids)
            self.q, row_weight = (ids[:, None] == np.arange(vocabulary)) * 1.0, self.class_weight[ids]
            if isinstance(target, Allowed):
                self.outside = _outside(target, count, vocabulary)[moved(np.arange(count).reshape(self.shape))]
        self.a = np.where(self.ignored, 0.0, weight)
        self.excluded = self.a == 0
        self.divisor = (self.a * row_weight).sum() if options.normalizer is None else float(options.normalizer)
        self.order = _ordered(z.reshape(count, vocabulary), activation.logit_scale)
        x, slope = _activated(z.reshape(count, vocabulary), activation)
        temperature = _float64(moved(activation.temperature))[:, None]
        self.x, self.slope = x / temperature, slope / temperature
        self.lse, self.surprise = _normalized(self._inside(self.x, -np.inf))
        self.surprise = self._inside(self.surprise, np.inf)
        """-log p, (N, V)."""
        self.p, self.z_term = np.exp(-self.surprise), np.zeros(count)
        if isinstance(target, TopK):
            loss, self.derivative = from_top_k(-self.surprise, target, self.shape, self.excluded, options.kind)
        elif isinstance(target, Dense):
            teacher = _activated(_raw(target.source).reshape(count, vocabulary), target.activation)[0]
            loss, self.derivative = between(-self.surprise, -_normalized(teacher)[1], options.kind, options.beta)
        else:
            # The factor of -log p_c: (1-e) w_y [c==y] + (e/V) w_c for a class index, w_c q'_c for class probabilities.
            smoothing = options.label_smoothing
            share = self.class_weight * ((1 - smoothing) * self.q + smoothing / vocabulary)
            loss, total = expectation(share, self.surprise), share.sum(-1)
            if options.z_loss:  # otherwise not even where lse is infinite, in a row whose support is empty
                self.z_term = self._masked(self.a * options.z_loss * self.lse**2, self.excluded)
                total = total + 2 * options.z_loss * self.lse
            self.derivative = total[:, None] * self.p - share
        self.loss = self._masked(self.a * loss + self.z_term, self.excluded)

    def _inside(self, array: Array, other: float) -> Array:
        """Return values (N, V) with another one outside of the support."""
        return array if self.outside is None else np.where(self.outside, other, array)

    def _masked(self, array: Array, mask: Array) -> Array:
        """Return values (N, ...) with 0 in some rows."""
        return np.where(mask if array.ndim == 1 else mask[:, None], 0.0, array)

    def reduced(self, per_row: Array) -> Array | np.float64:
        """Reduce values (N,) by the reduction of the call; 0 where the divisor of a mean is 0."""
        if self.options.reduction == "none":
            return per_row.reshape(self.shape)
        divisor = self.divisor if self.options.reduction == "mean" else 1
        return per_row.sum() / divisor if divisor != 0 else np.float64(0.0)

    def _scale(self, upstream: ArrayLike) -> Array:
        """Return the factor (N,) of the derivative of each row's loss: row weight, divisor and upstream gradient."""
        scale = self.a * _float64(upstream).reshape(-1)
        if self.options.reduction != "mean":
            return np.asarray(scale)
        return np.asarray(scale / self.divisor if self.divisor != 0 else scale * 0.0)

    def gradient(self, upstream: ArrayLike, others: Mapping[str, ArrayLike]) -> Array:
        """Return the (N, V) gradient with respect to the raw logits; `others`: upstream of lse, nll and entropy."""
        # The loss and the nll of a target outside its support have no gradient.
        beyond = np.isinf(expectation(self.q, self.surprise)) & (self.outside is not None)
        grad = self._masked(self._scale(upstream)[:, None] * self.derivative * self.slope, self.excluded | beyond)
        for name, upstream_of_stat in others.items():
            each = _float64(upstream_of_stat).reshape(-1)[:, None] * self._derivative(name) * self.slope
            grad = grad + self._masked(each, self.ignored | (beyond & (name == "nll")))
        return np.where(self.options.reduction == "mean" and self.divisor == 0, 0.0, grad)

    def target_gradient(self, upstream: ArrayLike, nll: ArrayLike | None) -> Array:
        """Return the (N, V) gradient with respect to class probabilities; `nll`: upstream of the statistic, or None."""
        factor = self._scale(upstream)[:, None] * (1 - self.options.label_smoothing) * self.class_weight
        if nll is not None:
            factor = factor + self._masked(_float64(nll).reshape(-1), self.ignored)[:, None]
        return np.where(factor == 0, 0.0, factor * self.surprise)

    def _derivative(self, name: str) -> Array:
        """Return the derivative (N, V) of a statistic with respect to x."""
        if name == "lse":
            return self.p
        if name == "nll":
            return np.asarray(self.q.sum(-1, keepdims=True) * self.p - self.q)
        entropy = expectation(self.p, self.surprise)[:, None]
        return np.where(self.p == 0, 0.0, self.p * (self.surprise - entropy))

    def stats(self) -> Stats:
        """Return the statistics that the options name."""
        count, classes = int((~self.ignored).sum()), self._inside(np.ones_like(self.x), 0.0).sum(-1)
        order = self._inside(self.order, -np.inf)
        predictions, truth = order.argmax(-1), self.q.argmax(-1)
        of_target = np.take_along_axis(order, truth[:, None], -1)
        hits = self._masked(1.0 * (predictions == truth), self.ignored)
        rows = {
            "lse": self.lse,
            "nll": expectation(self.q, self.surprise),
            "entropy": expectation(self.p, self.surprise),
            "predictions": predictions,
            "log_sum_sq_probs": np.log((self.p**2).sum(-1)),
            "mean_logit": self._inside(self.x, 0.0).sum(-1) / np.maximum(classes, 1),
        }
        computed: dict[str, Array | np.generic] = {
            name: self._masked(each, self.ignored).reshape(self.shape) for name, each in rows.items()
        }
        rank = (~(order <= of_target) & ~np.isnan(of_target)).sum(-1)
        computed["rank"] = np.where(self.ignored, -1, rank).reshape(self.shape)
        computed["predictions"] = np.where(self.ignored, -1, predictions).reshape(self.shape)
        computed |= {"z_loss": self.reduced(self.z_term), "count": np.int64(count)}
        computed["accuracy"] = hits.reshape(self.shape) if self.options.is_log_probs else hits.sum() / max(count, 1)
        return Stats(**{name: computed[name] for name in self.options.stats})


def _float64(array: ArrayLike) -> Array:
    """Return an array in float64."""
    return np.asarray(array, np.float64)


def _axis(source: Source) -> int:
    """Return the axis of the classes."""
    return source.axis if isinstance(source, Given) else -1


def _raw(source: Source) -> Array:
    """Return raw logits z (..., V)."""
    if isinstance(source, Given):
        return np.moveaxis(_float64(source.logits), source.axis, -1)
    z = _float64(source.input) @ _float64(source.weight).T
    return np.asarray(z if source.bias is None else z + _float64(source.bias))


def _ordered(z: Array, scale: Scalar) -> Array:
    """Return raw logits in the order of x, which a softcap would round to equal numbers."""
    return np.where(np.isnan(z), z, np.sign(scale) * z) if scale else np.zeros_like(z)


def _activated(z: Array, activation: Activation) -> tuple[Array, Array]:
    """Return x = k tanh(s z / k), or s z, and dx/dz, without the temperature of rows."""
    scale, softcap = activation.logit_scale, activation.softcap
    if softcap is None:
        return np.asarray(scale * z), np.full_like(z, scale)
    tanh = np.tanh(scale * z / softcap)
    return softcap * tanh, scale * (1 - tanh**2)


def _normalized(x: Array) -> tuple[Array, Array]:
    """Return the log-sum-exp (N,) of x (N, V), and its difference to x: -log p."""
    largest = x.max(-1)
    largest = np.where(largest == -np.inf, 0, largest)
    lse = np.log(np.exp(x - largest[:, None]).sum(-1)) + largest
    return lse, lse[:, None] - x


def _outside(support: Allowed, count: int, vocabulary: int) -> Array:
    """Return the mask (N, V) of the classes that are not in each row's support; raise for an invalid support."""
    ids, offsets = np.asarray(support.classes, np.int64), np.asarray(support.offsets, np.int64)
    begin, end = offsets[:-1], offsets[1:]
    check_support(ids, begin, end, vocabulary)
    outside = np.ones((count, vocabulary), bool)
    outside[np.repeat(np.arange(count), end - begin), ids] = False
    return outside
