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

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

import xent
from xent.backends.harness import Harness
from xent.backends.protocol import Backend
from xent.backends.reference import cross_entropy_gradient, linear_cross_entropy_gradients, target_gradient
from xent.backends.reference_divergence import divergence_gradients
from xent.command.check.case import LOSSES, Case, Inputs, make_inputs, mapped, placed
from xent.core.call import Call, Dense, Given, TopK
from xent.core.describe import linear_log_probs_call, linear_loss_call, log_probs_call, loss_call
from xent.core.describe_divergence import divergence_call, linear_divergence_call

__all__ = ["Comparison", "call_of", "compare", "judge_case", "results_of_case", "typical_of", "worst_of"]

_ALONE = " without gradients"
"""The suffix for names of results that were computed without gradients."""
_SLACK = 1.5
_DRAWS = 8
# If teacher and student nearly agree, a gradient is a small difference of large numbers: a few rows decide the worst.
_DRAWS_OF_DIVERGENCES = 24
_MOST_OF_A_DRAW = 2
_NOTHING = 1e-30
_UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
# In float64 the bound covers the rounding errors of the backend and of the reference.
_UNITS_ALLOWED = {"float16": 2, "bfloat16": 2, "float32": 2, "float64": 64}

Results = dict[str, Any]

_DESCRIBE: dict[str, Callable[..., Call]] = {
    "cross_entropy": loss_call,
    "linear_cross_entropy": linear_loss_call,
    "log_probs": log_probs_call,
    "linear_log_probs": linear_log_probs_call,
    "divergence": divergence_call,
    "linear_divergence": linear_divergence_call,
}


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
    backend: Backend, harness: Harness[Any], case: Case, seed: int = 0, workspace: int | None = None
) -> list[Comparison]:
    """Run a case on a backend, and compare its results and every gradient with the reference."""
    count, combined = (_DRAWS_OF_DIVERGENCES, typical_of) if case.is_divergence else (_DRAWS, worst_of)
    draws = [_judge_draw(backend, harness, case, seed, workspace)]
    if not all(comparison.passed for comparison in draws[0]):
        draws += [_judge_draw(backend, harness, case, seed + more, workspace) for more in range(1, count)]
    return [combined(same) for same in zip(*draws, strict=True)]


def _judge_draw(
    backend: Backend, harness: Harness[Any], case: Case, seed: int, workspace: int | None
) -> list[Comparison]:
    truth, made, plain, sizes = results_of_case(backend, harness, case, seed, workspace)
    return [compare(name, made[name], truth[name], plain[name], case, sizes.get(name)) for name in truth]


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
    return Comparison(draws[0].output, *(float(np.exp(np.mean(np.log(values)))) for values in (errors, bounds)))


def compare(output: str, made: Any, truth: Any, plain: Any, case: Case, sizes: Any = None) -> Comparison:
    """Compare one output with the reference. The bound follows from the error of the unfused computation, `plain`.

    `sizes`: the values that the errors of a gradient's rows are relative to; None for the norm of each row.
    """
    dtype = case.dtype
    is_result = output.removesuffix(_ALONE) in case.results
    if is_result and case.function != "linear_cross_entropy" and dtype != "float64":
        dtype = "float32"
    if output == "target" and dtype != "float64":  # class probabilities of a case are float32
        dtype = "float32"
    worst = _worst_result if is_result else partial(_worst_row, sizes)
    bound = _SLACK * worst(plain, truth) + _UNITS_ALLOWED[dtype] * _UNITS[dtype]
    return Comparison(output, worst(made, truth) if made.shape == truth.shape else np.inf, bound)


def _worst_result(values: Any, truth: Any) -> float:
    """Return the worst error over rows, relative to the largest absolute value. Infinite values must be equal."""
    infinite = np.isinf(truth)
    if (values[infinite] != truth[infinite]).any():
        return np.inf
    values, truth = np.where(infinite, 0.0, values), np.where(infinite, 0.0, truth)
    return float(np.abs(values - truth).max(initial=0) / max(np.abs(truth).max(initial=0), 1e-30))


def _worst_row(sizes: Any, values: Any, truth: Any) -> float:
    """Return the worst error over the rows of a gradient, relative to each row's size."""
    if not truth.size:
        return 0.0
    error = np.linalg.norm(np.atleast_2d(values - truth), axis=-1)
    size = np.linalg.norm(np.atleast_2d(truth), axis=-1) if sizes is None else sizes
    relative = np.where(size > 0, error / np.where(size > 0, size, 1.0), np.where(error > 0, np.inf, error))
    return float(relative.max())


def call_of(case: Case, differentiable: Results, options: Results) -> Call:
    """Return the validated call of a case on NumPy arrays. `options` includes the target or teacher."""
    parameters = inspect.signature(getattr(xent, case.function)).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.name != "backend"}
    return _DESCRIBE[case.function](**(defaults | case.keywords | options | differentiable))


def results_of_case(
    backend: Backend, harness: Harness[Any], case: Case, seed: int = 0, workspace: int | None = None
) -> tuple[Results, Results, Results, Results]:
    """Return (reference, backend, unfused, sizes); the first three contain results and gradients by name.

    `sizes` contains the size of each row of the gradients: the sum of the norms of the contributions of each result.
    Contributions may cancel, so an error may be small compared with them and large compared with their sum. The two
    terms of the entropy's gradient, p log p and p H, may cancel too, and their errors are those of x. So the entropy
    counts with the size of p in addition.
    """
    run = _Run.drawn(harness, case if workspace is None else replace(case, workspace=workspace), seed)
    case = run.case

    def fused(*arrays: Any) -> tuple[Any, ...]:
        named = dict(zip(run.inputs.differentiable, arrays, strict=True))
        returned = getattr(xent, case.function)(**named, **run.options, **case.keywords, backend=backend.name)
        return tuple(case.found_in(returned)[name] for name in case.results)

    def unfused(*arrays: Any) -> tuple[Any, ...]:
        *given, target = arrays if case.trained else (*arrays, None)
        return _of_logits(run, run.logits(tuple(given)), {"target": target} if case.trained else {})

    truth, sizes = _reference(run)
    made, plain = (run.named(harness.gradients(one, run.arrays, run.upstream)) for one in (fused, unfused))
    if case.function == "linear_log_probs":
        plain |= _exact(run)
    elif case.is_divergence and case.stats:
        plain["entropy"] = _exact(run)["entropy"]
    if case.alone:
        for name, array in zip(case.results, fused(*run.arrays), strict=True):
            made[name + _ALONE] = harness.numpy(array)
            truth[name + _ALONE], plain[name + _ALONE] = truth[name], plain[name]
    return truth, made, plain, sizes


@dataclass(frozen=True, eq=False)
class _Run:
    """A case, with its arrays on the device."""

    harness: Harness[Any]
    case: Case
    inputs: Inputs
    arrays: tuple[Any, ...]
    """The differentiable arrays; the target is the last one if it is differentiable."""
    options: Results
    """The options, and the target or teacher unless it is differentiable."""
    upstream: tuple[Any, ...]
    """An upstream gradient for each result; None if it is missing."""

    @classmethod
    def drawn(cls, harness: Harness[Any], case: Case, seed: int) -> "_Run":
        """Draw the arrays in the case's dtype."""
        inputs, wide = make_inputs(case, seed), case.wide
        arrays = tuple(harness.array(value, case.dtype) for value in inputs.differentiable.values())
        options = placed(harness, inputs.options, wide)
        if case.trained:
            inputs = replace(inputs, differentiable=inputs.differentiable | {"target": inputs.target})
            arrays = (*arrays, harness.array(inputs.target, wide))
        else:
            of_logits = case.is_divergence and case.teacher in ("logits", "linear")
            options[case.target] = placed(harness, inputs.target, case.dtype if of_logits else wide)
        given = {case.results[0]: inputs.upstream} | inputs.others
        found = (given.get(name) for name in case.results)
        upstream = tuple(None if values is None else harness.array(values, wide) for values in found)
        return cls(harness, case, inputs, arrays, options, upstream)

    def named(self, found: tuple[tuple[Any, ...], list[Any]]) -> Results:
        """Return results and gradients by name, as NumPy arrays."""
        results, gradients = found
        names = (*self.case.results, *self.inputs.differentiable)
        return dict(zip(names, map(self.harness.numpy, (*results, *gradients)), strict=True))

    def logits(self, arrays: tuple[Any, ...]) -> Any:
        """Return the logits of the unfused computation, in the dtype of the arrays."""
        return self.harness.linear(*(*arrays, None, None)[:3]) if self.case.is_linear else arrays[0]


def _reference(run: _Run) -> tuple[Results, Results]:
    """Compute the reference from the backend's inputs, which are rounded to the case's dtype.

    Return results and sizes.
    """
    case, numpy = run.case, run.harness.numpy
    arrays = dict(zip(run.inputs.differentiable, map(numpy, run.arrays), strict=True))
    options = mapped(numpy, run.options)
    returned = getattr(xent, case.function)(**arrays, **options, **case.keywords, backend="numpy")
    found = {name: np.asarray(value) for name, value in case.found_in(returned).items()}
    call, sign = call_of(case, arrays, options), -1 if case.function.endswith("log_probs") else 1
    nothing = np.zeros(found[case.results[0]].shape)
    given = {name: numpy(grad) for name, grad in zip(case.results, run.upstream, strict=True) if grad is not None}
    sizes: Results = {}
    for result, grad in given.items():
        first: Any = sign * np.asarray(grad, np.float64) if result == case.results[0] else nothing
        others = {} if result == case.results[0] else {result: grad}
        for name, share in _gradients(call, first, others, arrays).items():
            found[name] = found.get(name, 0.0) + share
            sizes[name] = sizes.get(name, 0.0) + _norms(share)
        if result == "entropy":
            shares = _gradients(call, nothing, {"lse": grad}, arrays)
            sizes |= {name: sizes[name] + _norms(share) for name, share in shares.items()}
    return found, sizes


def _norms(gradient: Any) -> Any:
    return np.linalg.norm(np.atleast_2d(gradient), axis=-1)


def _gradients(call: Call, upstream: Any, others: Results, names: Collection[str]) -> Results:
    if isinstance(call.target, Dense | TopK):
        made: Results = divergence_gradients(call, upstream)
    elif isinstance(call.source, Given):
        made = {"logits": cross_entropy_gradient(call, upstream, **others)}
    else:
        parts = linear_cross_entropy_gradients(call, upstream, **others)
        made = dict(zip(("input", "linear_weight", "linear_bias"), parts, strict=True))
    if "target" in names:
        made["target"] = target_gradient(call, upstream, **others)
    return {name: made[name] for name in names}


def _exact(run: _Run) -> Results:
    """Compute with logits in the dtype `wide`. Their gradient is rounded to the case's dtype."""
    harness, dtype, wide = run.harness, run.case.dtype, run.case.wide

    def rounded(values: Any) -> Any:
        return harness.array(harness.numpy(values), dtype)

    arrays = tuple(harness.array(harness.numpy(array), wide) for array in run.arrays)
    results, (grad,) = harness.gradients(
        lambda logits: _of_logits(run, logits, {}), (run.logits(arrays),), run.upstream
    )
    _, gradients = harness.gradients(
        lambda *given: run.logits(given), arrays, harness.array(harness.numpy(rounded(grad)), wide)
    )
    return run.named((results, list(map(rounded, gradients))))


def _of_logits(run: _Run, logits: Any, trained: Results) -> tuple[Any, ...]:
    """Compute the results of a case in unfused operations on logits. `trained` has the target if it is differentiable.

    With a shift, row t of the logits moves to the row of its target, t + shift, and its results move back.
    """
    case, harness, shift = run.case, run.harness, run.case.shift
    options, found = dict(run.inputs.options), {}
    here, moved, back = np.ones(case.rows, bool), _same, _same
    if shift:
        here[..., :shift] = False
        length = here.shape[-1]
        order, inverse = (harness.array((np.arange(length) + step) % length) for step in (-shift, shift))
        moved, back = lambda array: array[..., order, :], lambda array: array[..., inverse] if array.shape else array
        options["sample_weight"] = np.where(here, options.get("sample_weight", 1.0), 0.0)
    logits = moved(logits)
    if case.is_divergence:
        given = placed(harness, options, case.wide) | mapped(moved, _teacher_of(run))
        found["loss"] = harness.unfused_divergence(logits, reduction=case.reduction, **given)
    elif case.function in LOSSES:
        given = placed(harness, options | {"target": run.inputs.target}, case.wide) | trained
        found["loss"] = harness.unfused_loss(logits, reduction=case.reduction, **given)
    if len(case.results) > len(found):
        given = placed(harness, _options_of_rows(run, options, here), case.wide) | trained
        found |= harness.unfused_rows(logits, **given)
        found["log_probs"] = 0 - found["nll"]
    return tuple(back(found[name]) for name in case.results)


def _same(array: Any) -> Any:
    return array


def _teacher_of(run: _Run) -> Results:
    """Return the teacher's logits, with what else they need, or the classes that it knows."""
    teacher, kind = run.options["teacher"], run.case.teacher
    if kind == "logits":
        return {"teacher": teacher}
    if kind == "linear":
        logits = run.harness.linear(teacher.input, teacher.weight, teacher.bias)
        return {"teacher": logits, "teacher_softcap": teacher.softcap, "teacher_scale": teacher.logit_scale}
    return {"ids": teacher.ids, "log_probs": teacher.log_probs, "tail": kind}


def _options_of_rows(run: _Run, given: Results, here: Any) -> Results:
    """Return the options of log-probabilities, with dense masks in place of ignore_index and support.

    `here` has the rows that have logits.
    """
    if run.case.is_divergence:  # any target: of these results only the entropy is used
        target, ignored = np.zeros(here.shape, np.int64), given.get("sample_weight", here) == 0
    else:
        target, ignored = run.inputs.target, ~here
    if target.dtype.kind != "f":
        ignored = ignored | (target == given.get("ignore_index", -100))
        target = np.where(ignored, 0, target).astype(np.int64)
    options = {"target": target, "ignored": np.asarray(ignored)}
    options |= {name: given[name] for name in ("softcap", "logit_scale") if name in given}
    if "temperature" in given:
        options["temperature"] = np.full(here.shape, given["temperature"])
    support = given.get("support")
    if support is not None:
        allowed = np.zeros((here.size, run.case.vocabulary), bool)
        for row, (begin, end) in enumerate(pairwise(support.offsets)):
            allowed[row, support.ids[begin:end]] = True
        options["allowed"] = allowed.reshape(*here.shape, -1) | ignored[..., None]
    return options
