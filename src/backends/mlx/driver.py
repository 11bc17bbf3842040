"""The entry of the MLX driver: run the loop, attach gradients, return results in the caller's shapes."""

from collections.abc import Collection

import mlx.core as mx

from xent.backends.mlx import loop
from xent.backends.mlx.autograd import guarded, scaled, with_gradients
from xent.backends.mlx.facts import Facts, gather_facts
from xent.backends.mlx.kernels import KERNELS, Found
from xent.backends.mlx.prepare import accumulation_dtype, aligned, prepare, rows_of
from xent.backends.mlx.results import reduced, statistics
from xent.backends.mlx.sources import Collected, source_of
from xent.backends.mlx.steps import Divergences, Losses, Steps
from xent.backends.mlx.supported import Supported
from xent.backends.mlx.tracing import is_differentiated
from xent.core.call import Call, Dense, Given, Options, Probabilities, TopK
from xent.core.spec import DIFFERENTIABLE, ROW_STATS, Stats

__all__ = ["run"]


def run(call: Call, kernel: str) -> tuple[mx.array, Stats]:
    """Run a call with the row kernel of that backend; KeyError if none is registered.

    For a mean or sum, the gradients that are expected are computed with the loss. Other gradients, those of reduction
    "none", and that of class probabilities are computed later from the logits. With "none" the statistics lse, nll and
    entropy of a loss have gradients too.
    """
    call = aligned(call)
    given, target, shape = _leaves(call), call.target, rows_of(call)
    inputs = [*given.values(), *([target.values] if isinstance(target, Probabilities) else [])]
    if 0 in shape:
        return _of_no_rows(inputs, call.options, shape)
    rows = _Rows(call, kernel, shape, "weight" in given and is_differentiated(given["weight"]))
    facts, reduces = rows.facts, call.options.reduction != "none"
    expected = _expected(given) if reduces else []
    found, kept = rows.forward(expected)

    def gradients(upstream: dict[str, mx.array | None]) -> list[mx.array]:
        made, now, first = dict(kept), facts, expected
        kept.clear()
        if not reduces:
            now, first = facts.with_upstream(upstream, found.entropy), _expected(given)
        # Gradients that were not expected are computed separately, so that MLX evaluates them only if needed.
        for names in (first, *([name] for name in given if name not in first)):
            if not made.keys() >= set(names):
                made |= rows.backward(now, names)
        factor = facts.factor(upstream["loss"]) if reduces else None
        grads = [scaled(made.pop(name), factor, array.dtype) for name, array in given.items()]
        if isinstance(target, Probabilities):
            grads.append(scaled(rows.of_target(now, target.values), factor, target.values.dtype))
        return grads

    named = {"loss": reduced(found.loss, facts)} | statistics(found, facts)
    linked = ["loss"]
    if not (reduces or isinstance(target, (Dense, TopK))):
        linked += [name for name in DIFFERENTIABLE if name in named]
    named |= with_gradients({name: named[name] for name in linked}, inputs, gradients)
    flat = {name: value.reshape(shape) if value.ndim else value for name, value in named.items()}
    return flat.pop("loss"), Stats(**flat)


class _Rows:
    """The rows of an aligned call, as arrays that MLX does not differentiate."""

    def __init__(self, call: Call, kernel: str, shape: tuple[int, ...], trained: bool) -> None:
        """`trained`: whether the classifier is expected to need a gradient."""
        call = prepare(guarded(call))
        self.facts = gather_facts(call, shape)
        self._source, teacher = source_of(call, self.facts, trained)
        self._steps: Steps
        if isinstance(call.target, (Dense, TopK)):
            self._steps = Divergences(self.facts, teacher)
        else:
            losses = Losses(self.facts, KERNELS[kernel])
            self._steps = losses if self.facts.support is None else Supported(self.facts)

    def forward(self, needs: Collection[str]) -> tuple[Found, dict[str, mx.array]]:
        """Return the results of all rows, and the gradients that `needs` names."""
        step, sums = self._steps.forward(bool(needs)), self._source.sums(needs)
        made = loop.run(self._source, step, sums, self.facts.rows.dead, [])
        return self._steps.found(), made if needs else {}

    def backward(self, facts: Facts, needs: Collection[str]) -> dict[str, mx.array]:
        """Return the gradients that `needs` names, after the forward pass; compute the logits again."""
        step, after = self._steps.backward(facts)
        return loop.run(self._source, step, self._source.sums(needs), facts.rows.dead, after)

    def of_target(self, facts: Facts, target: mx.array) -> mx.array:
        """Return the gradient of class probabilities; compute the logits again."""
        assert isinstance(self._steps, Losses)
        assert isinstance(facts.call.target, Probabilities)
        step, after = self._steps.of_target(facts)
        made = loop.run(self._source, step, Collected("target", (-1, facts.vocabulary)), facts.rows.dead, after)
        rows, order = made["target"], facts.call.target.order
        if order is not None:  # rows without a target add zeros to the first one
            nothing = mx.zeros((target.size // facts.vocabulary, facts.vocabulary), rows.dtype)
            rows = nothing.at[mx.maximum(order, 0)].add(rows)
        return rows.reshape(target.shape)


def _leaves(call: Call) -> dict[str, mx.array]:
    """Return the arrays that may have a gradient: "logits"; or "input", "weight" unless it is quantized, "bias"."""
    source = call.source
    if isinstance(source, Given):
        return {"logits": source.logits}
    named = {"input": source.input, "weight": source.weight, "bias": source.bias}
    return {name: array for name, array in named.items() if isinstance(array, mx.array)}


def _expected(given: dict[str, mx.array]) -> list[str]:
    return [name for name, array in given.items() if is_differentiated(array)]


def _of_no_rows(inputs: list[mx.array], options: Options, shape: tuple[int, ...]) -> tuple[mx.array, Stats]:
    """Return results of rows of an empty `shape`, without operations on empty arrays: some crash on NVIDIA GPUs."""
    acc = accumulation_dtype(inputs[0].dtype)

    def zeros(name: str) -> mx.array:
        of_rows = name in ROW_STATS or (name in ("loss", "z_loss") and options.reduction == "none")
        of_rows = of_rows or (name == "accuracy" and options.accuracy_of_rows)
        return _filled(shape if of_rows else (), mx.int32 if name in ("predictions", "count") else acc)

    grads = [_filled(array.shape, array.dtype) for array in inputs]
    loss = with_gradients({"loss": zeros("loss")}, inputs, lambda _: grads)["loss"]
    return loss, Stats(**{name: zeros(name) for name in options.stats})


def _filled(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return a new array of zeros at each call: mx.compile fails if two results are the same array."""
    if shape and all(shape):
        return mx.zeros(shape, dtype)
    return mx.array([] if shape else [0], dtype).reshape(shape)
