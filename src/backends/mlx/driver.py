"""The MLX driver of a call: the loop over parts of its rows, its gradients, its results in the caller's shapes.

A row kernel computes the results of a part from its logits, and the gradient of these. Divergences and rows with a
support have MLX's own operations, on all devices. A pass takes the loop once; gradients that were not made in a forward
pass take it once more.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx

from xent.backends.mlx import divergence, plain
from xent.backends.mlx.autograd import guarded, is_differentiated, scaled, with_gradients
from xent.backends.mlx.devices import accumulation_dtype
from xent.backends.mlx.facts import aligned, gather_facts
from xent.backends.mlx.kernels import Facts, Results, RowKernel, joined, requested_results
from xent.backends.mlx.sources import Gradients, Loaded, Logits, cut, is_exact
from xent.core.call import Allowed, Call, Dense, Given, Options, Probabilities, TopK, array_of, without_temperature
from xent.core.spec import DIFFERENTIABLE, ROW_STATS, Stats

__all__ = ["run"]

_Grads = dict[str, mx.array]
_Step = Callable[[Loaded, slice], tuple[list[mx.array], mx.array | None]]
"""Maps the logits of a part to (results, which the step keeps; gradient of the logits, or None)."""


def run(call: Call, kernel: RowKernel) -> tuple[mx.array, Stats]:
    """Run a call with a row kernel: see `xent.backends.mlx.kernels`.

    For a mean or sum, the gradients that are expected are computed with the loss. Other gradients, those of reduction
    "none", and that of class probabilities are computed later from the logits. With "none" the statistics lse, nll and
    entropy of a loss have gradients too.
    """
    call = aligned(without_temperature(call))
    leaves, target, shape = _leaves(call), call.target, tuple(array_of(call).shape[:-1])
    inputs = [*leaves.values(), *([target.probs] if isinstance(target, Probabilities) else [])]
    if 0 in shape:
        return _of_no_rows(inputs, call.options, shape)
    rows = _PartLoop(call, kernel, "weight" in leaves and is_differentiated(leaves["weight"]))
    facts, reduces = rows.facts, call.options.reduction != "none"
    expected = _expected(leaves) if reduces else []
    results, early = rows.forward(expected)

    def gradients(upstream: dict[str, mx.array | None]) -> list[mx.array]:
        computed, current, together, factor = dict(early), facts, expected, facts.deferred
        early.clear()
        if not reduces:
            current, together = _with_upstream(facts, upstream, results.get("entropy")), _expected(leaves)
        elif upstream["loss"] is not None:
            factor = upstream["loss"].astype(facts.weight.dtype)
            factor = factor if facts.deferred is None else factor * facts.deferred
        # Gradients that were not expected are computed separately, so that MLX evaluates them only if needed.
        for names in (together, *([name] for name in leaves if name not in together)):
            if not computed.keys() >= set(names):
                computed |= rows.backward(current, names)
        grads = [scaled(computed.pop(name), factor, array.dtype).reshape(array.shape) for name, array in leaves.items()]
        if isinstance(target, Probabilities):
            grads.append(scaled(rows.of_target(current, target.probs), factor, target.probs.dtype))
        return grads

    named = {"loss": _reduced(results["loss"], facts)} | _statistics(results, facts)
    linked = ["loss"]
    if not (reduces or isinstance(target, (Dense, TopK))):
        linked += [name for name in DIFFERENTIABLE if name in named]
    named |= with_gradients({name: named[name] for name in linked}, inputs, gradients)
    flat = {name: value.reshape(shape) if value.ndim else value for name, value in named.items()}
    return flat.pop("loss"), Stats(**flat)


class _PartLoop:
    """The rows of an aligned call, as arrays that MLX does not differentiate, and the one loop over parts of them."""

    def __init__(self, call: Call, kernel: RowKernel, trained: bool) -> None:
        """`trained`: whether the classifier is expected to need a gradient."""
        call = guarded(call)
        source, target = call.source, call.target
        self.facts = facts = gather_facts(call)
        self._parts, self._teacher = cut(facts, trained), None
        weight, dtype = getattr(source, "weight", None), array_of(call).dtype
        self._gradients = partial(Gradients, weight=weight, dtype=dtype, parts=len(self._parts))
        self._kernel = plain if isinstance(target, Allowed) else kernel
        skippable = None if isinstance(source, Given) else facts.skippable
        if isinstance(target, (Dense, TopK)):
            self._kernel, skippable = divergence, facts.skippable
        if isinstance(target, Dense):
            self._teacher = Logits(target.source, skippable, True, None)
        self._logits = Logits(source, skippable, is_exact(call), facts.target)
        # The logits of an excluded row equal the bias, which may be -inf. In a support other classes are -inf.
        finite = not (isinstance(source, Given) or source.bias is not None or isinstance(target, Allowed))
        self._finite = finite and facts.row_activation is None and not call.options.stats

    def forward(self, needs: Sequence[str]) -> tuple[Results, _Grads]:
        """Return the results of all rows, and the gradients that `needs` names."""
        parts, names = list[Results](), requested_results(self.facts.call.options.stats, bool(needs))

        def step(loaded: Loaded, part: slice) -> tuple[list[mx.array], mx.array | None]:
            results = self._kernel.forward(loaded.logits, self._block(self.facts, loaded, part), names)
            # Keep no other reference to the gradient, so that MLX can reuse its memory.
            grad = results.pop("grad", None)
            parts.append(results)
            return list(results.values()), grad if needs else None

        grads = self._run(step, self._gradients(needs), self.facts, [])
        self._results = joined(parts)
        return self._results, grads

    def backward(self, facts: Facts, needs: Sequence[str]) -> _Grads:
        """Return the gradients that `needs` names, after the forward pass; compute the logits again."""
        return self._again(self._kernel.backward, self._gradients(needs), facts)

    def of_target(self, facts: Facts, target: mx.array) -> mx.array:
        """Return the gradient of class probabilities; compute the logits again."""
        rows = self._again(plain.target_gradient, Gradients(["target"]), facts)["target"]
        if facts.order is not None:  # rows without a target add zeros to the first one
            nothing = mx.zeros((target.size // rows.shape[1], rows.shape[1]), rows.dtype)
            rows = nothing.at[mx.maximum(facts.order, 0)].add(rows)
        return rows.reshape(target.shape)

    def _again(self, kernel: Callable[..., mx.array], sums: Gradients, facts: Facts) -> _Grads:
        def step(loaded: Loaded, part: slice) -> tuple[list[mx.array], mx.array]:
            norm = self._results["norm"][part] if "norm" in self._results else None
            return [], kernel(loaded.logits, self._block(facts, loaded, part), norm)

        return self._run(step, sums, facts, list(self._results.values()))

    def _block(self, facts: Facts, loaded: Loaded, part: slice) -> Facts:
        """Return the facts of a part for a row kernel."""
        whole = isinstance(facts.call.source, Given) and part.stop - part.start == facts.count
        teacher = None if self._teacher is None else self._teacher.load(part, [loaded.rows]).logits
        more, known = facts.part(part), loaded.target_logits
        return replace(more, target_logits=known, teacher=teacher, excluded_are_finite=self._finite, whole_call=whole)

    def _run(self, step: _Step, sums: Gradients, facts: Facts, tie: list[mx.array]) -> _Grads:
        """Compute all parts, each after the one before and the first after `tie`. Return the gradients by name."""
        for part in self._parts:
            loaded = self._logits.load(part, tie)
            tie, grad = step(loaded, part)
            if grad is not None:
                tie = tie + sums.add(grad, loaded.rows, facts.excluded[part])
            del loaded, grad
        return sums.result()


def _with_upstream(facts: Facts, upstream: dict[str, mx.array | None], entropy: mx.array | None) -> Facts:
    """Return the facts for the gradient of rows, from the upstream gradients of their losses and statistics.

    `entropy` (N,) is the statistic itself, if it has an upstream gradient.
    """
    flat = {name: grad.reshape(-1).astype(facts.scale.dtype) for name, grad in upstream.items() if grad is not None}
    scale = facts.scale * flat.pop("loss") if "loss" in flat else facts.scale
    if not flat:
        return replace(facts, scale=scale)
    if entropy is not None:
        flat["H"] = entropy
    # Rows with weight 0 have statistics too.
    return replace(facts, scale=mx.where(facts.excluded, 0, scale), excluded=facts.ignored, upstream=flat)


def _leaves(call: Call) -> dict[str, mx.array]:
    """Return the arrays that may have a gradient: "logits"; or "input", "weight" unless it is quantized, "bias"."""
    named = {name: getattr(call.source, name, None) for name in ("logits", "input", "weight", "bias")}
    return {name: array for name, array in named.items() if isinstance(array, mx.array)}


def _expected(leaves: dict[str, mx.array]) -> list[str]:
    return [name for name, array in leaves.items() if is_differentiated(array)]


def _of_no_rows(inputs: list[mx.array], options: Options, shape: tuple[int, ...]) -> tuple[mx.array, Stats]:
    """Return results of rows of an empty `shape`, without operations on empty arrays: some crash on NVIDIA GPUs."""
    acc, alone = accumulation_dtype(inputs[0].dtype), options.reduction == "none"
    of_rows = {*ROW_STATS, *["loss", "z_loss"] * alone, *["accuracy", "rank"] * options.is_log_probs}

    def zeros(name: str) -> mx.array:
        return _filled(shape if name in of_rows else (), mx.int32 if name in ("predictions", "count", "rank") else acc)

    grads = [_filled(array.shape, array.dtype) for array in inputs]
    loss = with_gradients({"loss": zeros("loss")}, inputs, lambda _: grads)["loss"]
    return loss, Stats(**{name: zeros(name) for name in options.stats})


def _filled(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return a new array of zeros at each call: mx.compile fails if two results are the same array."""
    if shape and all(shape):
        return mx.zeros(shape, dtype)
    return mx.array([] if shape else [0], dtype).reshape(shape)


def _reduced(per_row: mx.array, facts: Facts) -> mx.array:
    """Reduce values (N,) of rows by the reduction of the call: to 0-d, or for "none" return them unchanged."""
    if facts.call.options.reduction == "none":
        return per_row
    total = per_row.sum()
    # With divisor 0 all rows are excluded but invalid ones, which are NaN.
    return total if facts.divisor is None else total / mx.where(facts.divisor == 0, 1, facts.divisor)


def _statistics(results: Results, facts: Facts) -> dict[str, mx.array]:
    """Return the statistics that the options name, (N,) or 0-d."""
    ignored, options = facts.ignored, facts.call.options
    counted, statistics = (~ignored).sum(), dict[str, mx.array]()
    for name in options.stats:
        if name == "count":
            statistics[name] = counted
        elif name == "z_loss":
            factor = facts.number("z_loss")
            term = facts.weight * factor * mx.square(_lse(results))
            statistics[name] = _reduced(mx.where(facts.excluded | (factor == 0), 0, term), facts)
        elif name == "accuracy":
            correct = mx.equal(results["predictions"], _truth(facts)) & ~ignored
            correct = correct if facts.invalid is None else correct & ~facts.invalid
            right = correct.astype(results["loss"].dtype)
            statistics[name] = right if options.is_log_probs else right.sum() / mx.maximum(counted, 1)
        else:
            value = _lse(results) if name == "lse" else results[name]
            value = mx.where(ignored, -1 if name in ("predictions", "rank") else 0, value)
            if name == "rank" and facts.invalid is not None:
                value = mx.where(facts.invalid, -1, value)
            if name == "nll" and facts.invalid is not None:
                value = mx.where(facts.invalid, mx.nan, value)
            statistics[name] = value
    return statistics


def _lse(results: Results) -> mx.array:
    peak, log_sum = results["norm"][:, 0], results["norm"][:, 1]
    return mx.where(peak == -mx.inf, peak, peak + log_sum)


def _truth(facts: Facts) -> mx.array:
    """Return the target class of each row, (N,); for class probabilities the most probable class."""
    if facts.target is not None:
        return facts.target
    assert facts.probabilities is not None
    best = mx.argmax(facts.probabilities, axis=-1).astype(mx.int32)
    return best if facts.order is None else best[mx.maximum(facts.order, 0)]
