"""The reference implementation in float64 NumPy, which defines every option. All other backends are tested against it.

It is written to be compared with the formulas, not to be fast. As backend "numpy" it serves NumPy arrays (values only,
no autograd). `cross_entropy_gradient`, `linear_cross_entropy_gradients` and `target_gradient` return the analytic
gradients, which tests verify by finite differences.
"""

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from xent.backends.adapter import Adapted
from xent.backends.reference_divergence import divergence, student_entropy
from xent.core.heads import apart, combined
from xent.core.spec import BackendInfo, LinearCall, LogitsCall, LossSpec, Stats, Support
from xent.core.teachers import DivergenceCall

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

    def refuse(self, call: LogitsCall | LinearCall) -> str | None:
        """Refuse only `inplace`, because there is no gradient to write."""
        if isinstance(call, LogitsCall) and call.inplace:
            return "inplace=True reuses the logits for their gradient, and NumPy arrays get no gradient"
        return None

    def run(self, call: LogitsCall | LinearCall) -> tuple[Any, Stats]:
        """Return loss and statistics as float64."""
        if isinstance(call, LinearCall) and call.heads is not None:
            return combined(call, [self.run(one) for one in apart(call)], np)
        rows = _logits_rows(call) if isinstance(call, LogitsCall) else _linear_rows(call)
        return rows.loss(), rows.stats()

    def refuse_divergence(self, call: DivergenceCall) -> None:
        """Refuse nothing."""

    def run_divergence(self, call: DivergenceCall) -> tuple[Any, Stats]:
        """Return divergence and statistics as float64."""
        return divergence(call), Stats(entropy=student_entropy(call) if call.stats else None)

    def harness(self, device: str | None = None) -> NoReturn:
        """Raise: the checks compare other backends with the reference."""
        raise NotImplementedError("the reference is proved by finite differences, not by comparing it with itself")


BACKEND = Adapted(Reference())


def cross_entropy_gradient(call: LogitsCall, upstream: Any = 1.0, **others: Any) -> Array:
    """Return the gradient with respect to `call.logits`, in the logits' shape.

    `upstream` is the upstream gradient of the loss; `others` are those of lse, nll and entropy.
    """
    rows = _logits_rows(call)
    shape = np.moveaxis(np.asarray(call.logits), call.axis, -1).shape
    return np.moveaxis(rows.gradient(upstream, **others).reshape(shape), -1, call.axis)


def linear_cross_entropy_gradients(call: LinearCall, upstream: Any = 1.0, **others: Any) -> tuple[Array, Array, Array]:
    """Return the gradients with respect to input, linear_weight and a bias (given or not)."""
    if call.heads is not None:
        weights = call.heads.weight or (1,) * len(call.heads.shift)
        upstreams = upstream if call.loss.reduction == "none" else [upstream * weight for weight in weights]
        parts = [
            linear_cross_entropy_gradients(one, mine, **{name: given[head] for name, given in others.items()})
            for head, (one, mine) in enumerate(zip(apart(call), upstreams, strict=True))
        ]
        inputs, classifiers, biases = map(np.stack, zip(*parts, strict=True))
        return inputs, classifiers.sum(0), biases.sum(0)
    grad = _linear_rows(call).gradient(upstream, **others)
    hidden, weight = _float64(call.input), _float64(call.linear_weight)
    # Rows without a target contribute nothing, even if their hidden states are NaN.
    flat = np.where(grad.any(-1, keepdims=True), hidden.reshape(-1, weight.shape[1]), 0.0)
    return (grad @ weight).reshape(hidden.shape), grad.T @ flat, grad.sum(0)


def target_gradient(call: LogitsCall | LinearCall, upstream: Any = 1.0, nll: Any = None, **_: Any) -> Array:
    """Return the gradient with respect to a target of class probabilities, in its shape.

    `upstream` is the upstream gradient of the loss, `nll` that of nll; other statistics do not depend on the target.
    """
    if isinstance(call, LogitsCall):
        shape = np.moveaxis(np.asarray(call.logits), call.axis, -1).shape
        return np.moveaxis(_logits_rows(call).target_gradient(upstream, nll).reshape(shape), -1, call.axis)
    rows = _linear_rows(call).target_gradient(upstream, nll).reshape(call.target.shape)
    if not call.shift:
        return rows
    made = np.zeros_like(rows)
    made[..., call.shift :, :] = rows[..., : max(rows.shape[-2] - call.shift, 0), :]
    return made


@dataclass
class _Rows:
    """N rows of raw logits z (N, V), and all quantities in the formulas of `xent.cross_entropy`."""

    z: Array
    target: Array
    """(N,) classes, or (N, V) probabilities."""
    ignored: Array
    class_weight: Array
    sample_weight: Array
    normalizer: Any
    spec: LossSpec
    shape: tuple[int, ...]
    shift: int
    temperature: Array
    """(N,)"""
    outside: Array | None
    """(N, V): the mask of the classes that are not in each row's support."""

    def __post_init__(self) -> None:
        spec, classes = self.spec, np.arange(self.z.shape[1])
        self.a = np.where(self.ignored, 0.0, self.sample_weight)
        self.dead = (self.a == 0)[:, None]
        smoothing, vocabulary = spec.label_smoothing, self.z.shape[1]
        if self.target.ndim == 2:
            self.q = self.target
            row_weight = np.ones(len(self.z))
        else:
            self.target = np.where(self.ignored, 0, self.target)
            _check_targets(self.target, vocabulary, self.shape, self.spec.ignore_index, self.shift)
            self.q = (self.target[:, None] == classes).astype(np.float64)
            row_weight = self.class_weight[self.target]
        # The factor of -log p_c: (1-e) w_y [c==y] + (e/V) w_c for a class index y, w_c q'_c for class probabilities.
        self.share = self.class_weight * ((1 - smoothing) * self.q + smoothing / vocabulary)
        self.divisor = (self.a * row_weight).sum() if self.normalizer is None else self.normalizer

        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            x = spec.logit_scale * self.z
            inside = x if self.outside is None else np.where(self.outside, -np.inf, x)
            self.predictions = np.where(self.ignored, -1, inside.argmax(-1))
            self.slope: Any = spec.logit_scale
            if spec.softcap is not None:
                tanh = np.tanh(x / spec.softcap)
                x = spec.softcap * tanh
                self.slope = spec.logit_scale * (1 - tanh**2)
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
            z_term = _masked(self.a * self.spec.z_loss * self.lse**2, self.dead[:, 0] | (self.spec.z_loss == 0))
            loss = self.a * _expectation(self.share, self.surprise) + z_term
        return _masked(loss, self.dead[:, 0]), z_term

    def reduce(self, values: Array) -> Any:
        """Reduce values (N,) by the reduction of the call."""
        if self.spec.reduction == "none":
            return values.reshape(self.shape)
        total = values.sum()
        if self.spec.reduction == "sum":
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
            total = self.share.sum(-1) + (2 * self.spec.z_loss * self.lse if self.spec.z_loss else 0.0)
            grad = scale[:, None] * (total[:, None] * self.p - self.share) * self.slope
            grad = np.where(self.dead | beyond[:, None], 0.0, grad)
            for name, given in others.items():
                each = np.asarray(given, np.float64).reshape(-1)[:, None] * self._derivative(name) * self.slope
                each = np.where(beyond[:, None] & (name == "nll"), 0.0, each)
                grad = grad + np.where(self.ignored[:, None], 0.0, each)
        nothing = self.spec.reduction == "mean" and self.divisor == 0
        return np.asarray(np.where(nothing, 0.0, grad))

    def target_gradient(self, upstream: Any, nll: Any) -> Array:
        """Return the (N, V) gradient with respect to class probabilities; `nll`: upstream of the statistic, or None."""
        factor = self._scale(upstream)[:, None] * (1 - self.spec.label_smoothing) * self.class_weight
        if nll is not None:
            factor = factor + _masked(np.asarray(nll, np.float64).reshape(-1), self.ignored)[:, None]
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(factor == 0, 0.0, factor * self.surprise))

    def _scale(self, upstream: Any) -> Array:
        """Return the factor (N,) of the derivative of each row's loss: sample weight, divisor and upstream gradient."""
        scale = self.a * np.asarray(upstream, np.float64).reshape(-1)
        if self.spec.reduction == "mean":
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
        """Return the statistics that the spec names."""
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
                "accuracy": hits.astype(np.float64).reshape(self.shape) if self.spec.accuracy_of_rows else accuracy,
                "count": np.int64(count),
            }
        return Stats(**{name: values[name] for name in self.spec.stats})


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


def _logits_rows(call: LogitsCall) -> _Rows:
    _check_temperature(call.temperature, 0)
    z = np.moveaxis(_float64(call.logits), call.axis, -1)
    target = call.target
    if target.shape == call.logits.shape and target.dtype.kind == "f":
        target = np.moveaxis(target, call.axis, -1)
    return _rows(z, target, np.zeros(z.shape[:-1], bool), call)


def _linear_rows(call: LinearCall) -> _Rows:
    """Compute all logits. Row t of a shifted call has the target, sample weight and so on at t + shift."""
    _check_temperature(call.temperature, call.shift)
    sequence = max(len(call.input.shape) - 2, 0)
    length = call.input.shape[sequence] if call.shift else 0
    here = np.arange(length) + call.shift
    no_target = np.zeros(call.input.shape[:-1], bool)
    shifted = call
    take: Array = np.minimum(here, max(length - 1, 0))
    if call.shift:
        no_target = np.moveaxis(np.moveaxis(no_target, sequence, -1) | (here >= length), -1, sequence)

        def taken(values: Array | None) -> Array | None:
            return None if values is None else np.take(values, take, axis=sequence)

        shifted = replace(
            call,
            target=taken(call.target),
            sample_weight=taken(call.sample_weight),
            temperature=taken(call.temperature),
        )
    with np.errstate(invalid="ignore", over="ignore"):
        z = _float64(call.input) @ _float64(call.linear_weight).T
        if call.linear_bias is not None:
            z = z + _float64(call.linear_bias)
    order = np.arange(no_target.size).reshape(no_target.shape)
    if call.shift:
        order = np.take(order, take, axis=sequence)
    return _rows(z, shifted.target, no_target, shifted, order.ravel())


def _rows(
    z: Array, target: Array, no_target: Array, call: LogitsCall | LinearCall, order: Array | None = None
) -> _Rows:
    """Return the rows of a call. `order` has the index of each row in the support; None: its own index."""
    shape, vocabulary = z.shape[:-1], z.shape[-1]
    count = int(np.prod(shape))
    ignored = no_target.reshape(count)
    flat: Array
    if target.dtype.kind == "f":
        flat = _float64(target).reshape(count, vocabulary)
    else:
        flat = target.reshape(count)
        ignored = ignored | (flat == call.loss.ignore_index)
    weight = np.ones(vocabulary) if call.weight is None else _float64(call.weight)
    sample = np.ones(count) if call.sample_weight is None else _float64(call.sample_weight).reshape(count)
    normalizer = None if call.normalizer is None else float(call.normalizer)
    shift = call.shift if isinstance(call, LinearCall) else 0
    temperature = np.ones(count) if call.temperature is None else _float64(call.temperature).reshape(count)
    outside = None if call.support is None else _outside(call.support, count, vocabulary)
    if outside is not None and order is not None:
        outside = outside[order]
    return _Rows(
        z.reshape(count, vocabulary),
        flat,
        ignored,
        weight,
        sample,
        normalizer,
        call.loss,
        shape,
        shift,
        temperature,
        outside,
    )


def _outside(support: Support, count: int, vocabulary: int) -> Array:
    """Return the mask (N, V) of the classes that are not in each row's support; raise for an invalid support."""
    ids, offsets = np.asarray(support.ids, np.int64), np.asarray(support.offsets, np.int64)
    sizes = np.diff(offsets)
    if offsets[0] != 0 or (sizes < 0).any() or offsets[-1] != len(ids):
        raise ValueError(
            f"support.offsets must be non-decreasing from 0 to {len(ids)}, the number of ids; got {offsets[0]} to "
            f"{offsets[-1]}" + (" and a decrease between" if (sizes < 0).any() else "")
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
