"""The MLX driver of a call: the loop over parts of its rows, its gradients, its results in the caller's shapes.

The steps of a call compute the results of a part from its logits, and the gradient of these. `_Losses` has the row
kernel of a device, `xent.backends.mlx.divergence.Divergences` and `xent.backends.mlx.support.Supported` have MLX's own
operations. A pass takes the loop once; gradients that were not made in a forward pass take it once more.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from xent.backends.mlx import plain
from xent.backends.mlx.autograd import guarded, is_differentiated, scaled, with_gradients
from xent.backends.mlx.devices import accumulation_dtype
from xent.backends.mlx.divergence import Divergences, known_classes
from xent.backends.mlx.facts import Facts, gather_facts
from xent.backends.mlx.finish import reduced, statistics
from xent.backends.mlx.kernels import KERNELS, Kernels, Results, RowFacts, asked, joined
from xent.backends.mlx.prepare import aligned, prepare
from xent.backends.mlx.sources import Gradients, Loaded, Logits, cut, is_exact
from xent.backends.mlx.support import Supported, gather_entries
from xent.core.call import (
    Allowed,
    Call,
    Dense,
    Given,
    Options,
    Probabilities,
    TopK,
    array_of,
    vocabulary_of,
)
from xent.core.spec import DIFFERENTIABLE, ROW_STATS, Stats

__all__ = ["run"]

_Grads = dict[str, mx.array]
_Step = Callable[[Loaded, slice], tuple[list[mx.array], mx.array | None]]
"""Maps the logits of a part to (results, which the step keeps; gradient of the logits, or None)."""


def run(call: Call, kernel: str) -> tuple[mx.array, Stats]:
    """Run a call with the row kernel of that backend; KeyError if none is registered.

    For a mean or sum, the gradients that are expected are computed with the loss. Other gradients, those of reduction
    "none", and that of class probabilities are computed later from the logits. With "none" the statistics lse, nll and
    entropy of a loss have gradients too.
    """
    call = aligned(call)
    given, target, shape = _leaves(call), call.target, tuple(array_of(call).shape[:-1])
    inputs = [*given.values(), *([target.values] if isinstance(target, Probabilities) else [])]
    if 0 in shape:
        return _of_no_rows(inputs, call.options, shape)
    rows = _Rows(call, kernel, "weight" in given and is_differentiated(given["weight"]))
    facts, reduces = rows.facts, call.options.reduction != "none"
    expected = _expected(given) if reduces else []
    found, kept = rows.forward(expected)

    def gradients(upstream: dict[str, mx.array | None]) -> list[mx.array]:
        made, now, first = dict(kept), facts, expected
        kept.clear()
        if not reduces:
            now, first = facts.with_upstream(upstream, found.get("entropy")), _expected(given)
        # Gradients that were not expected are computed separately, so that MLX evaluates them only if needed.
        for names in (first, *([name] for name in given if name not in first)):
            if not made.keys() >= set(names):
                made |= rows.backward(now, names)
        factor = facts.factor(upstream["loss"]) if reduces else None
        grads = [scaled(made.pop(name), factor, array.dtype).reshape(array.shape) for name, array in given.items()]
        if isinstance(target, Probabilities):
            grads.append(scaled(rows.of_target(now, target.values), factor, target.values.dtype))
        return grads

    named = {"loss": reduced(found["loss"], facts)} | statistics(found, facts)
    linked = ["loss"]
    if not (reduces or isinstance(target, (Dense, TopK))):
        linked += [name for name in DIFFERENTIABLE if name in named]
    named |= with_gradients({name: named[name] for name in linked}, inputs, gradients)
    flat = {name: value.reshape(shape) if value.ndim else value for name, value in named.items()}
    return flat.pop("loss"), Stats(**flat)


class _Rows:
    """The rows of an aligned call, as arrays that MLX does not differentiate, and the one loop over parts of them."""

    def __init__(self, call: Call, kernel: str, trained: bool) -> None:
        """`trained`: whether the classifier is expected to need a gradient."""
        call = prepare(guarded(call))
        target, vocabulary, acc = call.target, vocabulary_of(call.source), accumulation_dtype(array_of(call).dtype)
        entries = wrong = known = teacher = None
        if isinstance(target, Allowed):
            entries = gather_entries(target, vocabulary)
            wrong = entries.wrong
        elif isinstance(target, TopK):
            known, wrong = known_classes(target, vocabulary, acc)
        self.facts = facts = gather_facts(call, wrong)
        self._parts, exact, diverges = cut(facts, trained), is_exact(facts), isinstance(target, (Dense, TopK))
        idle = None if isinstance(call.source, Given) and not diverges else facts.idle
        self._logits = Logits(call.source, idle, exact, facts.rows.target)
        if isinstance(target, Dense):
            teacher = Logits(target.source, facts.idle, True, None)
        self._steps: _Losses | Divergences | Supported
        if diverges:
            self._steps = Divergences(facts, teacher, known)
        else:
            self._steps = _Losses(facts, KERNELS[kernel]) if entries is None else Supported(facts, entries)

    def forward(self, needs: Sequence[str]) -> tuple[Results, _Grads]:
        """Return the results of all rows, and the gradients that `needs` names."""
        parts: list[Results] = []

        def step(loaded: Loaded, part: slice) -> tuple[list[mx.array], mx.array | None]:
            found = self._steps.forward(loaded, part, bool(needs))
            # Keep no other reference to the gradient, so that MLX can reuse its memory.
            grad = found.pop("grad", None)
            parts.append(found)
            return list(found.values()), grad if needs else None

        made = self._run(step, self._logits.gradients(needs, len(self._parts)), self.facts, [])
        self._found = self._steps.found() if isinstance(self._steps, Supported) else joined(parts)
        return self._found, made

    def backward(self, facts: Facts, needs: Sequence[str]) -> _Grads:
        """Return the gradients that `needs` names, after the forward pass; compute the logits again."""
        sums = self._logits.gradients(needs, len(self._parts))
        return self._again(self._steps.backward(facts, self._found), sums, facts)

    def of_target(self, facts: Facts, target: mx.array) -> mx.array:
        """Return the gradient of class probabilities; compute the logits again."""
        assert isinstance(self._steps, _Losses)
        assert isinstance(facts.call.target, Probabilities)
        gradient, sums = self._steps.backward(facts, self._found, plain.target_gradient), Gradients(["target"])
        rows, order = self._again(gradient, sums, facts)["target"], facts.call.target.order
        if order is not None:  # rows without a target add zeros to the first one
            nothing = mx.zeros((target.size // facts.vocabulary, facts.vocabulary), rows.dtype)
            rows = nothing.at[mx.maximum(order, 0)].add(rows)
        return rows.reshape(target.shape)

    def _again(self, gradient: Callable[[Loaded, slice], mx.array], sums: Gradients, facts: Facts) -> _Grads:
        return self._run(lambda loaded, part: ([], gradient(loaded, part)), sums, facts, list(self._found.values()))

    def _run(self, step: _Step, sums: Gradients, facts: Facts, tie: list[mx.array]) -> _Grads:
        """Compute all parts, each after the one before and the first after `tie`. Return the gradients by name."""
        for part in self._parts:
            loaded = self._logits.load(part, tie)
            tie, grad = step(loaded, part)
            if grad is not None:
                tie = tie + sums.add(grad, loaded.rows, facts.rows.dead[part])
            del loaded, grad
        return sums.result()


class _Losses:
    """The steps of losses and log-probabilities over all classes, with the row kernel of a device."""

    def __init__(self, facts: Facts, kernels: Kernels) -> None:
        self._facts, self._kernels = facts, kernels
        source, stats = facts.call.source, facts.call.options.stats
        self._stored = isinstance(source, Given)
        # The logits of a dead row equal the bias, which may be -inf.
        self._finite = not (isinstance(source, Given) or stats or facts.rows.bend is not None) and source.bias is None

    def forward(self, loaded: Loaded, part: slice, wanted: bool) -> Results:
        """Return the results of some rows, with the gradient of their logits if it is wanted."""
        names = asked(self._facts.call.options.stats, wanted)
        return self._kernels.forward(loaded.logits, self._rows(self._facts, loaded, part), names)

    def backward(self, facts: Facts, found: Results, kernel: Any = None) -> Callable[[Loaded, slice], mx.array]:
        """Return the function that computes the gradient of the logits of some rows, or another with its `kernel`."""
        compute = kernel or self._kernels.backward
        return lambda loaded, part: compute(loaded.logits, self._rows(facts, loaded, part), found["norm"][part])

    def _rows(self, facts: Facts, loaded: Loaded, part: slice) -> RowFacts:
        alone = self._stored and part.stop - part.start == facts.count
        return replace(facts.block(part), target_logits=loaded.target_logits, finite=self._finite, alone=alone)


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
    acc, alone = accumulation_dtype(inputs[0].dtype), options.reduction == "none"
    of_rows = {*ROW_STATS, *["loss", "z_loss"] * alone, *["accuracy"] * options.accuracy_of_rows}

    def zeros(name: str) -> mx.array:
        return _filled(shape if name in of_rows else (), mx.int32 if name in ("predictions", "count") else acc)

    grads = [_filled(array.shape, array.dtype) for array in inputs]
    loss = with_gradients({"loss": zeros("loss")}, inputs, lambda _: grads)["loss"]
    return loss, Stats(**{name: zeros(name) for name in options.stats})


def _filled(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return a new array of zeros at each call: mx.compile fails if two results are the same array."""
    if shape and all(shape):
        return mx.zeros(shape, dtype)
    return mx.array([] if shape else [0], dtype).reshape(shape)
