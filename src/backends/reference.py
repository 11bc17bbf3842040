"""The reference implementation in float64 NumPy, which defines every option. All other backends are tested against it.

It is written to be compared with the formulas, not to be fast. As backend "numpy" it serves NumPy arrays (values only,
no autograd). `cross_entropy_gradient`, `linear_cross_entropy_gradients` and `target_gradient` return the analytic
gradients, which tests verify by finite differences.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from xent.backends.reference_divergence import divergence, student_entropy
from xent.backends.reference_logits import Array, activated, float64, gradients, raw, reduced, scaled
from xent.core.call import Allowed, Call, Classes, Dense, Given, Options, Probabilities, TopK
from xent.core.spec import ROW_STATS, BackendInfo, Stats
from xent.core.values import check_support, check_targets, check_temperature

__all__ = ["BACKEND", "Reference", "cross_entropy_gradient", "linear_cross_entropy_gradients", "target_gradient"]


class Reference:
    """Backend "numpy": every call on NumPy arrays, in float64."""

    name = "numpy"
    framework = "numpy"
    native_to: tuple[str, ...] = ()

    def missing(self) -> None:
        """Return None: this backend is always available."""
        return None

    def info(self) -> BackendInfo:
        """Report NumPy's version."""
        return BackendInfo(self.name, self.framework, True, None, {"numpy": np.__version__}, ("cpu",))

    def refuse(self, call: Call) -> str | None:
        """Refuse only `inplace`, because there is no gradient to write."""
        if isinstance(call.source, Given) and call.source.inplace:
            return "inplace=True reuses the logits for their gradient, and NumPy arrays get no gradient"
        return None

    def run(self, call: Call) -> tuple[Any, Stats]:
        """Return loss and statistics as float64."""
        if isinstance(call.target, Dense | TopK):
            return divergence(call), Stats(entropy=student_entropy(call) if call.options.stats else None)
        if call.options.heads is not None:
            return _combined(call, [self.run(one) for one in _apart(call)])
        rows = _Rows(call)
        return rows.reduce(rows.per_row()[0]), rows.stats()

    def harness(self, device: str | None = None) -> NoReturn:
        """Raise: the checks compare other backends with the reference."""
        raise NotImplementedError("the reference is proved by finite differences, not by comparing it with itself")


BACKEND = Reference()


def cross_entropy_gradient(call: Call, upstream: Any = 1.0, **others: Any) -> Array:
    """Return the gradient with respect to the logits, in their shape.

    `upstream` is the upstream gradient of the loss; `others` are those of lse, nll and entropy.
    """
    return gradients(call.source, _Rows(call).gradient(upstream, **others))["logits"]


def linear_cross_entropy_gradients(call: Call, upstream: Any = 1.0, **others: Any) -> tuple[Array, Array, Array]:
    """Return the gradients with respect to input, linear_weight and a bias (given or not)."""
    options = call.options
    if options.heads is None:
        made = gradients(call.source, _Rows(call).gradient(upstream, **others))
        return made["input"], made["linear_weight"], made["linear_bias"]
    upstreams = upstream if options.reduction == "none" else [upstream * factor for factor in _factors(options)]
    parts = [
        linear_cross_entropy_gradients(one, mine, **{name: given[head] for name, given in others.items()})
        for head, (one, mine) in enumerate(zip(_apart(call), upstreams, strict=True))
    ]
    inputs, classifiers, biases = map(np.stack, zip(*parts, strict=True))
    return inputs, classifiers.sum(0), biases.sum(0)


def target_gradient(call: Call, upstream: Any = 1.0, nll: Any = None, **_: Any) -> Array:
    """Return the gradient with respect to a target of class probabilities, in its shape.

    `upstream` is the upstream gradient of the loss, `nll` that of nll; other statistics do not depend on the target.
    """
    made = _Rows(call).target_gradient(upstream, nll)
    if isinstance(call.source, Given):
        return gradients(call.source, made)["logits"]
    assert isinstance(call.target, Probabilities)
    rows = made.reshape(call.target.values.shape)
    shift = _shift(call.options)
    moved = np.zeros_like(rows)
    moved[..., shift:, :] = rows[..., : max(rows.shape[-2] - shift, 0), :] if shift else rows
    return moved


def _apart(call: Call) -> list[Call]:
    """Return one call per head. Head j predicts target t + shift[j] from row t of its own hidden states."""
    source, options = call.source, call.options
    assert not isinstance(source, Given)
    shifts = options.shift
    assert isinstance(shifts, tuple)
    if "accuracy" in options.stats and "count" not in options.stats:
        options = options._replace(stats=(*options.stats, "count"))
    return [
        call._replace(
            source=source._replace(input=source.input[head]),
            options=options._replace(shift=shift, heads=None, head_weight=None),
        )
        for head, shift in enumerate(shifts)
    ]


def _factors(options: Options) -> Sequence[Any]:
    """Return the factor of each head's reduced loss, of which the loss is the sum."""
    return options.head_weight or (1,) * (options.heads or 1)


def _combined(call: Call, parts: Sequence[tuple[Any, Stats]]) -> tuple[Any, Stats]:
    """Combine the losses and statistics of one call per head."""
    losses, stats = zip(*parts, strict=True)
    each_row, weights = call.options.reduction == "none", np.asarray(_factors(call.options))
    found: dict[str, Any] = {}
    for name in call.options.stats:
        values = np.stack([getattr(one, name) for one in stats])
        if name in ROW_STATS or (name == "z_loss" and each_row):
            found[name] = values
        elif name == "accuracy":
            counts = np.stack([one.count for one in stats])
            found[name] = values @ counts / max(counts.sum(), 1)
        else:
            found[name] = weights @ values if name == "z_loss" else values.sum()
    return np.stack(losses) if each_row else weights @ np.stack(losses), Stats(**found)


class _Rows:
    """N rows of raw logits z (N, V), and all quantities in the formulas of `xent.cross_entropy`.

    Row t of a shifted call has the target and weight at t + shift.
    """

    def __init__(self, call: Call) -> None:
        target, activation, options = call.target, call.activation, call.options
        assert isinstance(target, Classes | Allowed | Probabilities)
        self.options, shift, z = options, _shift(options), raw(call.source)
        if activation.temperature is not None:
            check_temperature(np.asarray(activation.temperature), shift)
        self.shape, vocabulary = z.shape[:-1], z.shape[-1]
        count, length = int(np.prod(self.shape)), self.shape[-1] if shift else 0
        here = np.arange(length) + shift

        def moved(values: Any) -> Array:
            """Return the values (N, ...) of the rows, from those of the targets (..., T, ...); ones for None."""
            values = np.ones(self.shape) if values is None else np.asarray(values)
            if shift:
                values = np.take(values, np.minimum(here, max(length - 1, 0)), axis=len(self.shape) - 1)
            flat: Array = values.reshape(count, *values.shape[len(self.shape) :])
            return flat

        ignored = (np.broadcast_to(here >= length, self.shape) if shift else np.zeros(self.shape, bool)).reshape(count)
        self.class_weight = np.ones(vocabulary) if options.weight is None else float64(options.weight)
        outside = None
        if isinstance(target, Probabilities):
            values = target.values
            axis = call.source.axis if isinstance(call.source, Given) else -1
            self.q = float64(moved(np.moveaxis(values, axis, -1)))
            self.truth, row_weight = self.q.argmax(-1), np.ones(count)
        else:
            ids = moved(target.ids)
            ignored = ignored | (ids == options.ignore_index)
            self.truth = np.where(ignored, 0, ids)
            check_targets(np.asarray(target.ids), vocabulary, options.ignore_index, shift)
            self.q = (self.truth[:, None] == np.arange(vocabulary)).astype(np.float64)
            row_weight = self.class_weight[self.truth]
            if isinstance(target, Allowed):
                outside = _outside(target, count, vocabulary)[moved(np.arange(count).reshape(self.shape))]
        self.ignored, self.outside = ignored, outside
        """(N, V): the mask of the classes that are not in each row's support, or None."""
        self.a = np.where(ignored, 0.0, float64(moved(options.sample_weight)))
        self.dead = (self.a == 0)[:, None]
        smoothing = options.label_smoothing
        # The factor of -log p_c: (1-e) w_y [c==y] + (e/V) w_c for a class index y, w_c q'_c for class probabilities.
        self.share = self.class_weight * ((1 - smoothing) * self.q + smoothing / vocabulary)
        given = options.normalizer
        self.divisor = (self.a * row_weight).sum() if given is None else float(given)

        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            z = z.reshape(count, vocabulary)
            scaled_z = activation.logit_scale * z
            self.predictions = np.where(ignored, -1, _inside(scaled_z, outside, -np.inf).argmax(-1))
            temperature = float64(moved(activation.temperature))[:, None]
            x, slope = activated(z, activation)
            x, self.slope = x / temperature, slope / temperature
            classes = vocabulary if outside is None else np.maximum((~outside).sum(-1), 1)
            self.mean_logit = _inside(x, outside, 0.0).sum(-1) / classes
            x = _inside(x, outside, -np.inf)
            largest = x.max(-1, keepdims=True)
            largest = np.where(largest == -np.inf, 0, largest)
            self.lse = np.log(np.exp(x - largest).sum(-1)) + largest[:, 0]
            self.surprise = _inside(self.lse[:, None] - x, outside, np.inf)
            self.p = _inside(np.exp(-self.surprise), outside, 0.0)

    def per_row(self) -> tuple[Array, Array]:
        """Return l_i and its z-loss term, both (N,)."""
        with np.errstate(invalid="ignore"):
            # Without a z-loss also where lse is infinite, in a row whose support is empty.
            z_term = _masked(self.a * self.options.z_loss * self.lse**2, self.dead[:, 0] | (self.options.z_loss == 0))
            loss = self.a * _expectation(self.share, self.surprise) + z_term
        return _masked(loss, self.dead[:, 0]), z_term

    def reduce(self, values: Array) -> Any:
        """Reduce values (N,) by the reduction of the call."""
        return reduced(values, self.options, self.divisor, self.shape)

    def gradient(self, upstream: Any, **others: Any) -> Array:
        """Return the (N, V) gradient with respect to the raw logits; `others`: upstream of lse, nll and entropy."""
        scale = scaled(self.a, upstream, self.options, self.divisor)
        beyond = np.isinf(_expectation(self.q, self.surprise)) & (self.outside is not None)  # targets without support
        with np.errstate(invalid="ignore"):
            total = self.share.sum(-1) + (2 * self.options.z_loss * self.lse if self.options.z_loss else 0.0)
            grad = scale[:, None] * (total[:, None] * self.p - self.share) * self.slope
            grad = np.where(self.dead | beyond[:, None], 0.0, grad)
            for name, given in others.items():
                each = np.asarray(given, np.float64).reshape(-1)[:, None] * self._derivative(name) * self.slope
                each = np.where(beyond[:, None] & (name == "nll"), 0.0, each)
                grad = grad + np.where(self.ignored[:, None], 0.0, each)
        nothing = self.options.reduction == "mean" and self.divisor == 0
        return np.asarray(np.where(nothing, 0.0, grad))

    def target_gradient(self, upstream: Any, nll: Any) -> Array:
        """Return the (N, V) gradient with respect to class probabilities; `nll`: upstream of the statistic, or None."""
        scale = scaled(self.a, upstream, self.options, self.divisor)
        factor = scale[:, None] * (1 - self.options.label_smoothing) * self.class_weight
        if nll is not None:
            factor = factor + _masked(np.asarray(nll, np.float64).reshape(-1), self.ignored)[:, None]
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(factor == 0, 0.0, factor * self.surprise))

    def _derivative(self, name: str) -> Array:
        """Return the derivative (N, V) of a statistic with respect to x."""
        if name == "lse":
            return np.asarray(self.p)
        if name == "nll":
            return np.asarray(self.q.sum(-1, keepdims=True) * self.p - self.q)
        entropy = _expectation(self.p, self.surprise)[:, None]
        return np.asarray(np.where(self.p == 0, 0.0, self.p * (self.surprise - entropy)))

    def stats(self) -> Stats:
        """Return the statistics that the options name."""
        count = int((~self.ignored).sum())
        hits = (self.predictions == self.truth) & ~self.ignored
        accuracy = np.float64(hits.sum() / count if count else 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            values = {
                "lse": _masked(self.lse, self.ignored).reshape(self.shape),
                "nll": _masked(_expectation(self.q, self.surprise), self.ignored).reshape(self.shape),
                "entropy": _masked(_expectation(self.p, self.surprise), self.ignored).reshape(self.shape),
                "predictions": self.predictions.reshape(self.shape),
                "log_sum_sq_probs": _masked(np.log((self.p**2).sum(-1)), self.ignored).reshape(self.shape),
                "mean_logit": _masked(self.mean_logit, self.ignored).reshape(self.shape),
                "z_loss": self.reduce(self.per_row()[1]),
                "accuracy": hits.astype(np.float64).reshape(self.shape) if self.options.accuracy_of_rows else accuracy,
                "count": np.int64(count),
            }
        return Stats(**{name: values[name] for name in self.options.stats})


def _expectation(weights: Array, values: Array) -> Array:
    """Sum weights * values over classes; a weight of 0 contributes 0, even if the value is infinite."""
    with np.errstate(invalid="ignore"):
        products: Array = np.where(weights == 0, 0.0, weights * values)
    return np.asarray(products.sum(-1))


def _inside(values: Array, outside: Array | None, other: float) -> Array:
    """Return values (N, V) with another one outside of the support."""
    return values if outside is None else np.where(outside, other, values)


def _masked(values: Array, mask: Array) -> Array:
    return np.where(mask, 0.0, values)


def _shift(options: Options) -> int:
    """Return the shift of a call with one head."""
    assert isinstance(options.shift, int)
    return options.shift


def _outside(support: Allowed, count: int, vocabulary: int) -> Array:
    """Return the mask (N, V) of the classes that are not in each row's support; raise for an invalid support."""
    ids, begin, end = (np.asarray(part, np.int64) for part in (support.classes, support.begin, support.end))
    check_support(ids, begin, end, vocabulary)
    rows = np.repeat(np.arange(count), end - begin)
    outside = np.ones((count, vocabulary), bool)
    outside[rows, ids] = False
    return outside
