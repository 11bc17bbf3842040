"""Compare results and gradients with the float64 reference. The bound is the framework's own rounding error.

The reference gets the same inputs as the backend, rounded to the case's dtype. The error of each row of a gradient is
relative to the norm of the row, or, if there are several results, to the sum of the norms of their contributions. The
worst error must be at most 1.5 times the worst error of the framework's unfused computation on the same inputs, plus
two units in the last place (64 in float64). Rows whose gradient is exactly zero must be exactly zero. A zero, negated,
doubled or row-shifted gradient exceeds this bound by far in every dtype.

By chance, the unfused computation may round a few rows well on one processor and not on another. If one draw of the
inputs exceeds its bound, the worst errors of both over several draws are compared.

For log-probabilities of hidden states, the unfused computation begins with the framework's float32 product. So a
log-probability may have the error of float32 logits. Its gradients may have the error of float32 logits whose gradient
is rounded to the case's dtype. The entropy of a divergence is compared with that of float32 logits, too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import xent
from xent.backends.protocol import Backend
from xent.backends.reference import gradients
from xent.command.check.case import LOSSES, Array, Case, Inputs, Named, make_inputs, mapped, placed
from xent.command.check.harness import Harness, Operand
from xent.core.call import Call
from xent.core.signature import FUNCTIONS

__all__ = ["Comparison", "call_of", "compare", "judge_case", "results_of_case", "typical_of", "worst_of"]

_ALONE = " without gradients"
"""The suffix for names of results that were computed without gradients."""
_SLACK = 1.5
_DRAWS = 8
# If teacher and student nearly agree, a gradient is a small difference of large numbers: a few rows decide the worst.
_DRAWS_OF_DIVERGENCES = 24
_MOST_OF_A_DRAW = 2
_NOTHING = 1e-30
_ROUNDING = {"float16": 2 * 2.0**-10, "bfloat16": 2 * 2.0**-7, "float32": 2 * 2.0**-23, "float64": 64 * 2.0**-52}
"""Units in the last place that are allowed: in float64 for the rounding errors of the backend and of the reference."""


Operands = tuple[Operand, ...]


@dataclass(frozen=True)
class Comparison:
    """The error of one output of one case, and its bound."""

    output: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; false for NaN."""
        return self.error <= self.bound


def judge_case(
    backend: Backend, harness: Harness[Operand], case: Case, seed: int = 0, workspace: int | None = None
) -> list[Comparison]:
    """Run a case on a backend, and compare its results and every gradient with the reference."""
    case = case if workspace is None else replace(case, workspace=workspace)
    count, combined = (_DRAWS_OF_DIVERGENCES, typical_of) if case.is_divergence else (_DRAWS, worst_of)
    draws: list[list[Comparison]] = []
    while len(draws) < count and not (draws and all(comparison.passed for comparison in draws[0])):
        truth, computed, plain, sizes = results_of_case(backend, harness, case, seed + len(draws))
        draws.append([compare(name, computed[name], truth[name], plain[name], case, sizes.get(name)) for name in truth])
    return [combined(same) for same in zip(*draws, strict=True)]


def worst_of(draws: Sequence[Comparison]) -> Comparison:
    """Return the worst error and the largest bound of several draws of one output."""
    errors, bounds = zip(*((draw.error, draw.bound) for draw in draws), strict=True)
    return Comparison(draws[0].output, float(np.max(errors)), float(np.max(bounds)))


def typical_of(draws: Sequence[Comparison]) -> Comparison:
    """Return the geometric means of error and bound over several draws; the worst draw if it is far beyond all bounds.

    This is for gradients that may nearly cancel. In the row that cancels most, rounding decides the worst error by
    chance, for the backend and for the unfused computation. The geometric means hardly depend on such a row.
    """
    worst = worst_of(draws)
    if not worst.error <= _MOST_OF_A_DRAW * worst.bound:
        return worst
    errors, bounds = ([max(getattr(draw, name), _NOTHING) for draw in draws] for name in ("error", "bound"))
    return Comparison(draws[0].output, *(float(np.exp(np.mean(np.log(series)))) for series in (errors, bounds)))


def compare(output: str, computed: Array, truth: Array, plain: Array, case: Case, sizes: Any = None) -> Comparison:
    """Compare one output with the reference. The bound follows from the error of the unfused computation, `plain`.

    `sizes`: the values that the errors of a gradient's rows are relative to; None for the norm of each row.
    """
    is_result = output.removesuffix(_ALONE) in case.results
    is_wide = output == "target" or (is_result and case.function != "linear_cross_entropy")
    dtype = case.wide if is_wide else case.dtype
    if is_result:  # relative to the largest value
        computed, truth, plain = (np.asarray(array)[..., None] for array in (computed, truth, plain))
        sizes = np.abs(truth[np.isfinite(truth)]).max(initial=0)
    elif sizes is None:
        sizes = _norms(truth)
    bound = _SLACK * _worst(plain, truth, sizes) + _ROUNDING[dtype]
    return Comparison(output, _worst(computed, truth, sizes) if computed.shape == truth.shape else np.inf, bound)


def _worst(computed: Array, truth: Array, sizes: Array) -> float:
    """Return the worst error over rows, relative to their sizes. Infinite values must be equal."""
    infinite = np.isinf(truth)
    if (computed[infinite] != truth[infinite]).any():
        return np.inf
    error = _norms(np.where(infinite, 0.0, computed) - np.where(infinite, 0.0, truth))
    relative = np.where(sizes > 0, error / np.where(sizes > 0, sizes, 1.0), np.where(error > 0, np.inf, error))
    return float(relative.max(initial=0))


def call_of(case: Case, differentiable: Named, options: Named) -> Call:
    """Return the validated call of a case on NumPy arrays. `options` includes the target or teacher."""
    function = FUNCTIONS[case.function]
    arguments = dict(zip(function.names, function.defaults, strict=True)) | case.keywords | options | differentiable
    return function.describe(arguments, arguments)


def results_of_case(
    backend: Backend, harness: Harness[Operand], case: Case, seed: int = 0
) -> tuple[Named, Named, Named, Named]:
    """Return (reference, backend, unfused, sizes); the first three contain results and gradients by name.

    `sizes` contains the size of each row of the gradients: the sum of the norms of the contributions of each result.
    Contributions may cancel, so an error may be small compared with them and large compared with their sum. The two
    terms of the entropy's gradient, p log p and p H, may cancel too, and their errors are those of x. So the entropy
    counts with the size of p in addition.
    """
    inputs, wide = make_inputs(case, seed), case.wide
    arrays = {name: harness.array(value, case.dtype) for name, value in inputs.differentiable.items()}
    options = placed(harness, inputs.options, wide)
    of_logits = case.is_divergence and case.teacher in ("logits", "linear")
    target = placed(harness, inputs.target, case.dtype if of_logits else wide)
    (arrays if case.trained else options)[case.target] = target
    leaves, count = tuple(arrays.values()), len(inputs.differentiable)
    drawn = {case.results[0]: inputs.upstream} | inputs.others
    grads = {name: harness.array(grad, wide) for name, grad in drawn.items() if grad is not None}
    upstream = tuple(map(grads.get, case.results))

    def logits_of(*operands: Operand) -> Operand:
        return harness.linear(*(*operands, None)[:3]) if case.is_linear else operands[0]

    def rows_of(logits: Operand, target: Operand = target) -> Operands:
        return _unfused(harness, case, inputs, logits, target)

    def unfused(*operands: Operand) -> Operands:
        return rows_of(logits_of(*operands[:count]), *operands[count:])

    def fused(*operands: Operand) -> Operands:
        named = dict(zip(arrays, operands, strict=True))
        returned = getattr(xent, case.function)(**named, **options, **case.keywords, backend=backend.name)
        return tuple(case.results_in(returned)[name] for name in case.results)

    def cast(array: Operand, dtype: str) -> Operand:
        return harness.array(harness.numpy(array), dtype)

    def exact() -> tuple[Operands, list[Operand]]:
        """Compute with logits in the dtype `wide`. Their gradient is rounded to the case's dtype."""
        wide_leaves = tuple(cast(array, wide) for array in leaves)
        results, (grad,) = harness.gradients(rows_of, (logits_of(*wide_leaves),), upstream)
        _, gradients = harness.gradients(logits_of, wide_leaves, cast(cast(grad, case.dtype), wide))
        return results, [cast(gradient, case.dtype) for gradient in gradients]

    def named(outputs: tuple[Operands, list[Operand]]) -> Named:
        results, gradients = outputs
        return dict(zip((*case.results, *arrays), map(harness.numpy, (*results, *gradients)), strict=True))

    computed = named(harness.gradients(fused, leaves, upstream))
    is_exact = case.function == "linear_log_probs"
    plain = named(exact() if is_exact else harness.gradients(unfused, leaves, upstream))
    if case.is_divergence and case.stats:
        plain["entropy"] = named(exact())["entropy"]
    truth, sizes = _reference(case, *(mapped(harness.numpy, group) for group in (arrays, options, grads)))
    if case.alone:
        for name, array in zip(case.results, fused(*leaves), strict=True):
            computed[name + _ALONE] = harness.numpy(array)
            truth[name + _ALONE], plain[name + _ALONE] = truth[name], plain[name]
    return truth, computed, plain, sizes


def _reference(case: Case, arrays: Named, options: Named, upstream: Named) -> tuple[Named, Named]:
    """Compute the reference from the backend's inputs, which are rounded to the case's dtype.

    Return results and sizes.
    """
    returned = getattr(xent, case.function)(**arrays, **options, **case.keywords, backend="numpy")
    truth = {name: np.asarray(value) for name, value in case.results_in(returned).items()}
    call, sign = call_of(case, arrays, options), -1 if case.function.endswith("log_probs") else 1
    nothing = np.zeros(truth[case.results[0]].shape)
    sizes: Named = {}
    for result, grad in upstream.items():
        is_first = result == case.results[0]
        shares = _gradients(call, sign * grad if is_first else nothing, {} if is_first else {result: grad}, arrays)
        for name, share in shares.items():
            truth[name] = truth.get(name, 0.0) + share
            sizes[name] = sizes.get(name, 0.0) + _norms(share)
        if result == "entropy":
            for name, share in _gradients(call, nothing, {"lse": grad}, arrays).items():
                sizes[name] = sizes[name] + _norms(share)
    return truth, sizes


def _norms(gradient: Array) -> Array:
    return np.asarray(np.linalg.norm(np.atleast_2d(gradient), axis=-1))


def _gradients(call: Call, upstream: Array, others: Named, names: Collection[str]) -> Named:
    by_name = gradients(call, upstream, **others)
    return {name: by_name[name] for name in names}


def _unfused(harness: Harness[Operand], case: Case, inputs: Inputs, logits: Operand, target: Operand) -> Operands:
    """Compute the results of a case in unfused operations on logits. `target` is that of `inputs` on the device.

    With a shift, targets and options move: those of t + shift to row t. The last rows have none, and have weight 0.
    """
    options, results, ignored = dict(inputs.options), {}, np.zeros(case.rows, bool)

    def moved(array: Array) -> Array:
        return np.roll(array, -case.shift, len(case.rows) - 1) if case.shift else array

    if case.shift:
        ignored[..., max(case.rows[-1] - case.shift, 0) :] = True
        weight = np.broadcast_to(options.get("sample_weight", 1.0), case.rows)
        options["sample_weight"] = np.where(ignored, 0.0, moved(weight))
    if case.is_divergence:
        keywords = placed(harness, options, case.wide) | _teacher_of(harness, case, target)
        results["loss"] = harness.unfused_divergence(logits, reduction=case.reduction, **keywords)
        ignored = ignored | (np.asarray(options.get("sample_weight", 1.0)) == 0)
        target = harness.array(np.zeros(case.rows, np.int64))  # any: of these results only the entropy is used
    else:
        is_classes = inputs.target.dtype.kind != "f"
        if is_classes:
            ignored = ignored | (moved(inputs.target) == options.get("ignore_index", -100))
        if case.shift:
            order = harness.array(np.roll(np.arange(case.rows[-1]), -case.shift))
            target = target[..., order] if is_classes else target[..., order, :]
        if case.function in LOSSES:
            keywords = placed(harness, options, case.wide)
            results["loss"] = harness.unfused_loss(logits, target, reduction=case.reduction, **keywords)
    if len(case.results) > len(results):
        keywords = {name: options[name] for name in ("softcap", "logit_scale") if name in options}
        if "temperature" in options:
            keywords["temperature"] = moved(np.broadcast_to(options["temperature"], case.rows))
        if "support" in options:
            support, allowed = options["support"], np.zeros((ignored.size, case.vocabulary), bool)
            allowed[np.arange(ignored.size).repeat(np.diff(support.offsets)), support.ids] = True
            keywords["allowed"] = moved(allowed.reshape(*case.rows, case.vocabulary)) | ignored[..., None]
        results |= harness.unfused_rows(
            logits, target, **placed(harness, keywords | {"ignored": np.asarray(ignored)}, case.wide)
        )
        results["log_probs"] = 0 - results["nll"]
    return tuple(results[name] for name in case.results)


def _teacher_of(harness: Harness[Operand], case: Case, teacher: Any) -> Named:
    """Return the teacher's logits, with what else they need, or the classes that it knows."""
    if case.teacher == "logits":
        return {"teacher": teacher}
    if case.teacher == "linear":
        logits = harness.linear(teacher.input, teacher.weight, teacher.bias)
        return {"teacher": logits, "teacher_softcap": teacher.softcap, "teacher_scale": teacher.logit_scale}
    return {"ids": teacher.ids, "log_probs": teacher.log_probs, "tail": case.teacher}
