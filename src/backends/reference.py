"""The reference implementation in float64 NumPy, which defines every option. All other backends are tested against it.

It is written to be compared with the formulas, not to be fast. As backend "numpy" it serves NumPy arrays (values only,
no autograd). `cross_entropy_gradient`, `linear_cross_entropy_gradients` and `target_gradient` return the analytic
gradients, which tests verify by finite differences.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from xent.backends.reference_divergence import divergence, student_entropy
from xent.backends.reference_heads import apart, combined, factors
from xent.core.call import Activation, Allowed, Call, Classes, Dense, Given, Options, Probabilities, TopK
from xent.core.spec import BackendInfo, Stats

__all__ = ["BACKEND", "Reference", "cross_entropy_gradient", "linear_cross_entropy_gradients", "target_gradient"]

Array = NDArray[Any]


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
            return combined(call, [self.run(one) for one in apart(call)])
        rows = _rows(call)
        return rows.loss(), rows.stats()

    def harness(self, device: str | None = None) -> NoReturn:
        """Raise: the checks compare other backends with the reference."""
        raise NotImplementedError("the reference is proved by finite differences, not by comparing it with itself")


BACKEND = Reference()


def cross_entropy_gradient(call: Call, upstream: Any = 1.0, **others: Any) -> Array:
    """Return the gradient with respect to the logits, in their shape.

    `upstream` is the upstream gradient of the loss; `others` are those of lse, nll and entropy.
    """
    return _like_logits(call, _rows(call).gradient(upstream, **others))


def linear_cross_entropy_gradients(call: Call, upstream: Any = 1.0, **others: Any) -> tuple[Array, Array, Array]:
    """Return the gradients with respect to input, linear_weight and a bias (given or not)."""
    source, options = call.source, call.options
    assert not isinstance(source, Given)
    if options.heads is not None:
        upstreams = upstream if options.reduction == "none" else [upstream * factor for factor in factors(options)]
        parts = [
            linear_cross_entropy_gradients(one, mine, **{name: given[head] for name, given in others.items()})
            for head, (one, mine) in enumerate(zip(apart(call), upstreams, strict=True))
        ]
        inputs, classifiers, biases = map(np.stack, zip(*parts, strict=True))
        return inputs, classifiers.sum(0), biases.sum(0)
    grad = _rows(call).gradient(upstream, **others)
    hidden, weight = _float64(source.input), _float64(source.weight)
    # Rows without a target contribute nothing, even if their hidden states are NaN.
    flat = np.where(grad.any(-1, keepdims=True), hidden.reshape(-1, weight.shape[1]), 0.0)
    return (grad @ weight).reshape(hidden.shape), grad.T @ flat, grad.sum(0)


def target_gradient(call: Call, upstream: Any = 1.0, nll: Any = None, **_: Any) -> Array:
    """Return the gradient with respect to a target of class probabilities, in its shape.

    `upstream` is the upstream gradient of the loss, `nll` that of nll; other statistics do not depend on the target.
    """
    made = _rows(call).target_gradient(upstream, nll)
    if isinstance(call.source, Given):
        return _like_logits(call, made)
    assert isinstance(call.target, Probabilities)
    rows = made.reshape(call.target.values.shape)
    shift = _shift(call.options)
    moved = np.zeros_like(rows)
    moved[..., shift:, :] = rows[..., : max(rows.shape[-2] - shift, 0), :] if shift else rows
    return moved


def _like_logits(call: Call, rows: Array) -> Array:
    """Return values (N, V) in the shape of the logits."""
    assert isinstance(call.source, Given)
    shape = np.moveaxis(np.asarray(call.source.logits), call.source.axis, -1).shape
    return np.moveaxis(rows.reshape(shape), -1, call.source.axis)


@dataclass
class _Rows:
    """N rows of raw logits z (N, V), and all quantities in the formulas of `xent.cross_entropy`."""

    z: Array
    target: Array
    """(N,) classes, or (N, V) probabilities."""
    ignored: Array
    class_weight: Array
    sample_weight: Array
    options: Options
    activation: Activation
    shape: tuple[int, ...]
    temperature: Array
    """(N,)"""
    outside: Array | None
    """(N, V): the mask of the classes that are not in each row's support."""

    def __post_init__(self) -> None:
        scale, softcap = self.activation.logit_scale, self.activation.softcap
        options, classes = self.options, np.arange(self.z.shape[1])
        self.a = np.where(self.ignored, 0.0, self.sample_weight)
        self.dead = (self.a == 0)[:, None]
        smoothing, vocabulary = options.label_smoothing, self.z.shape[1]
        if self.target.ndim == 2:
            self.q = self.target
            row_weight = np.ones(len(self.z))
        else:
            self.target = np.where(self.ignored, 0, self.target)
            _check_targets(self.target, vocabulary, self.shape, options.ignore_index, _shift(options))
            self.q = (self.target[:, None] == classes).astype(np.float64)
            row_weight = self.class_weight[self.target]
        # The factor of -log p_c: (1-e) w_y [c==y] + (e/V) w_c for a class index y, w_c q'_c for class probabilities.
        self.share = self.class_weight * ((1 - smoothing) * self.q + smoothing / vocabulary)
        given = options.normalizer
        self.divisor = (self.a * row_weight).sum() if given is None else float(given)

        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            x = scale * self.z
            inside = x if self.outside is None else np.where(self.outside, -np.inf, x)
            self.predictions = np.where(self.ignored, -1, inside.argmax(-1))
            self.slope: Any = scale
            if softcap is not None:
                tanh = np.tanh(x / softcap)
                x = softcap * tanh
                self.slope = scale * (1 - tanh**2)
            x = x / self.temperature[:, None]
            self.slope = self.slope / self.temperature[:, None]
            self.mean_logit = _mean(x, self.outside)
            if self.outside is not None:
                x = np.where(self.outside, -np.inf, x)
            largest = x.max(-1, keepdims=True)
            largest = np.where(largest == -np.inf, 0, largest)
            self.lse = np.log(np.exp(x - largest).sum(-1)) + largest[:, 0]
            self.surprise = self.lse[:, None] - x
            self.p = np.exp(-self.surprise)
            if self.outside is not None:
                self.surprise[self.outside] = np.inf
                self.p[self.outside] = 0.0

    def per_row(self) -> tuple[Array, Array]:
        """Return l_i and its z-loss term, both (N,)."""
        with np.errstate(invalid="ignore"):
            # Without a z-loss also where lse is infinite, in a row whose support is empty.
            z_term = _masked(self.a * self.options.z_loss * self.lse**2, self.dead[:, 0] | (self.options.z_loss == 0))
            loss = self.a * _expectation(self.share, self.surprise) + z_term
        return _masked(loss, self.dead[:, 0]), z_term

    def reduce(self, values: Array) -> Any:
        """Reduce values (N,) by the reduction of the call."""
        if self.options.reduction == "none":
            return values.reshape(self.shape)
        total = values.sum()
        if self.options.reduction == "sum":
            return total
        return total / self.divisor if self.divisor != 0 else np.float64(0.0)

    def loss(self) -> Any:
        """Return the reduced loss."""
        return self.reduce(self.per_row()[0])

    def gradient(self, upstream: Any, **others: Any) -> Array:
        """Return the (N, V) gradient with respect to the raw logits; `others`: upstream of lse, nll and entropy."""
        scale = self._scale(upstream)
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
        factor = self._scale(upstream)[:, None] * (1 - self.options.label_smoothing) * self.class_weight
        if nll is not None:
            factor = factor + _masked(np.asarray(nll, np.float64).reshape(-1), self.ignored)[:, None]
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(factor == 0, 0.0, factor * self.surprise))

    def _scale(self, upstream: Any) -> Array:
        """Return the factor (N,) of the derivative of each row's loss: sample weight, divisor and upstream gradient."""
        scale = self.a * np.asarray(upstream, np.float64).reshape(-1)
        if self.options.reduction == "mean":
            scale = scale / self.divisor if self.divisor != 0 else scale * 0.0
        return np.asarray(scale)

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
        truth = self.target.argmax(-1) if self.target.ndim == 2 else self.target
        count = int((~self.ignored).sum())
        hits = (self.predictions == truth) & ~self.ignored
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


def _mean(x: Array, outside: Array | None) -> Array:
    """Return the mean of x over the classes in the support, (N,)."""
    if outside is None:
        return np.asarray(x.mean(-1))
    return np.asarray(np.where(outside, 0.0, x).sum(-1) / np.maximum((~outside).sum(-1), 1))


def _masked(values: Array, mask: Array) -> Array:
    return np.where(mask, 0.0, values)


def _float64(array: Any) -> Array:
    return np.asarray(array, np.float64)


def _check_targets(target: Array, vocabulary: int, shape: tuple[int, ...], ignore_index: int, shift: int) -> None:
    wrong = np.flatnonzero((target < 0) | (target >= vocabulary))
    if wrong.size:
        position = [int(i) for i in np.unravel_index(wrong[0], shape)]
        if shift:
            position[-1] += shift
        raise IndexError(
            f"target{position or ''} is {target[wrong[0]]}; classes are 0 to {vocabulary - 1}, or "
            f"ignore_index={ignore_index}"
        )


def _check_temperature(temperature: Array | None, shift: int) -> None:
    if temperature is None:
        return
    wrong = ~(temperature > 0)
    if shift:
        wrong[..., :shift] = False
    if wrong.any():
        position = [int(i) for i in np.argwhere(wrong)[0]]
        raise ValueError(
            f"temperature must be > 0 in every row, got {temperature[tuple(position)]} at {position or 'its row'}"
        )


def _rows(call: Call) -> _Rows:
    """Return the rows of a call, with all logits. Row t of a shifted call has the target and weight at t + shift."""
    source, target, activation, options = call.source, call.target, call.activation, call.options
    assert isinstance(target, Classes | Allowed | Probabilities)
    shift = _shift(options)
    _check_temperature(activation.temperature, shift)
    wanted = target.values if isinstance(target, Probabilities) else target.ids
    if isinstance(source, Given):
        z = np.moveaxis(_float64(source.logits), source.axis, -1)
        wanted = np.moveaxis(wanted, source.axis, -1) if isinstance(target, Probabilities) else wanted
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            z = _float64(source.input) @ _float64(source.weight).T
            z = z if source.bias is None else z + _float64(source.bias)
    shape, vocabulary = z.shape[:-1], z.shape[-1]
    count = int(np.prod(shape))
    length = shape[-1] if shift else 0
    here = np.arange(length) + shift

    def moved(values: Array) -> Array:
        """Return the values (N, ...) of the rows, from those of the targets (..., T, ...)."""
        if shift:
            values = np.take(values, np.minimum(here, max(length - 1, 0)), axis=len(shape) - 1)
        return values.reshape(count, *values.shape[len(shape) :])

    no_target = np.broadcast_to(here >= length, shape) if shift else np.zeros(shape, bool)
    ignored, flat = no_target.reshape(count), moved(wanted)
    if isinstance(target, Probabilities):
        flat = _float64(flat)
    else:
        ignored = ignored | (flat == options.ignore_index)
    outside = _outside(target, count, vocabulary) if isinstance(target, Allowed) else None
    ones = np.ones(shape)
    return _Rows(
        z.reshape(count, vocabulary),
        flat,
        ignored,
        np.ones(vocabulary) if options.weight is None else _float64(options.weight),
        moved(ones if options.sample_weight is None else _float64(options.sample_weight)),
        options,
        activation,
        shape,
        moved(ones if activation.temperature is None else _float64(activation.temperature)),
        None if outside is None else outside[moved(np.arange(count).reshape(shape))],
    )


def _shift(options: Options) -> int:
    """Return the shift of a call with one head."""
    assert isinstance(options.shift, int)
    return options.shift


def _outside(support: Allowed, count: int, vocabulary: int) -> Array:
    """Return the mask (N, V) of the classes that are not in each row's support; raise for an invalid support."""
    ids, begin, end = (np.asarray(part, np.int64) for part in (support.classes, support.begin, support.end))
    sizes = end - begin
    first, last = (begin[0], end[-1]) if count else (0, 0)
    if first != 0 or (sizes < 0).any() or last != len(ids):
        raise ValueError(
            f"support.offsets must be non-decreasing from 0 to {len(ids)}, the number of ids; got {first} to {last}"
            + (" and a decrease between" if (sizes < 0).any() else "")
        )
    wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if wrong.size:
        raise IndexError(f"support.ids[{wrong[0]}] is {ids[wrong[0]]}; classes are 0 to {vocabulary - 1}")
    rows = np.repeat(np.arange(count), sizes)
    found, times = np.unique(rows * vocabulary + ids, return_counts=True)
    if (times > 1).any():
        row, again = divmod(int(found[times > 1][0]), vocabulary)
        raise ValueError(f"support.ids must hold a class at most once in a row; row {row} has {again} more than once")
    outside = np.ones((count, vocabulary), bool)
    outside[rows, ids] = False
    return outside
