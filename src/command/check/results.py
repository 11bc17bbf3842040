"""Results and gradients of one case from the reference, from a backend, and from the framework's unfused operations.

For log-probabilities of hidden states, the unfused computation begins with the framework's float32 product. So a
log-probability may have the error of float32 logits. Its gradients may have the error of float32 logits whose gradient
is rounded to the case's dtype. The entropy of a divergence is compared with that of float32 logits, too.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

import xent
from xent.backends.protocol import Backend, Harness
from xent.backends.reference import BACKEND, cross_entropy_gradient, linear_cross_entropy_gradients, target_gradient
from xent.backends.reference_divergence import divergence_gradients
from xent.command.check.case import LOSSES, Case, Inputs, make_inputs, mapped, placed
from xent.core.call import Call, Given
from xent.core.describe import linear_log_probs_call, linear_loss_call, log_probs_call, loss_call
from xent.core.describe_divergence import divergence_call, linear_divergence_call

__all__ = ["ALONE", "Results", "call_of", "results_of_case"]

ALONE = " without gradients"
"""The suffix for names of results that were computed without gradients."""

Results = dict[str, Any]

_DESCRIBE: dict[str, Callable[..., Call]] = {
    "cross_entropy": loss_call,
    "linear_cross_entropy": linear_loss_call,
    "log_probs": log_probs_call,
    "linear_log_probs": linear_log_probs_call,
    "divergence": divergence_call,
    "linear_divergence": linear_divergence_call,
}


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

    truth, sizes = _reference(run)
    made = run.named(harness.gradients(fused, run.arrays, run.upstream))
    plain = run.named(_unfused(run))
    if case.function == "linear_log_probs":
        plain |= _exact(run)
    elif case.is_divergence and case.stats:
        plain["entropy"] = _exact(run)["entropy"]
    if case.alone:
        for name, array in zip(case.results, fused(*run.arrays), strict=True):
            made[name + ALONE] = harness.numpy(array)
            truth[name + ALONE], plain[name + ALONE] = truth[name], plain[name]
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
    call = call_of(case, arrays, mapped(numpy, run.options))
    loss, stats = BACKEND.run(call)
    sign = -1 if case.function.endswith("log_probs") else 1
    results = [loss if sign > 0 else 0 - loss, *(getattr(stats, name) for name in case.results[1:])]
    found = dict(zip(case.results, map(np.asarray, results), strict=True))
    given = {name: numpy(grad) for name, grad in zip(case.results, run.upstream, strict=True) if grad is not None}
    sizes: Results = {}
    for result, grad in given.items():
        first: Any = sign * np.asarray(grad, np.float64) if result == case.results[0] else np.zeros(np.shape(loss))
        others = {} if result == case.results[0] else {result: grad}
        for name, share in _gradients(call, first, others, arrays).items():
            found[name] = found.get(name, 0.0) + share
            sizes[name] = sizes.get(name, 0.0) + _norms(share)
        if result == "entropy":
            shares = _gradients(call, np.zeros(np.shape(loss)), {"lse": grad}, arrays)
            sizes |= {name: sizes[name] + _norms(share) for name, share in shares.items()}
    return found, sizes


def _norms(gradient: Any) -> Any:
    return np.linalg.norm(np.atleast_2d(gradient), axis=-1)


def _gradients(call: Call, upstream: Any, others: Results, names: Collection[str]) -> Results:
    if hasattr(call.target, "log_probs") or hasattr(call.target, "source"):
        made: Results = divergence_gradients(call, upstream)
    elif isinstance(call.source, Given):
        made = {"logits": cross_entropy_gradient(call, upstream, **others)}
    else:
        parts = linear_cross_entropy_gradients(call, upstream, **others)
        made = dict(zip(("input", "linear_weight", "linear_bias"), parts, strict=True))
    if "target" in names:
        made["target"] = target_gradient(call, upstream, **others)
    return {name: made[name] for name in names}


def _unfused(run: _Run) -> tuple[tuple[Any, ...], list[Any]]:
    """Compute in the framework's own operations, with logits in the case's dtype."""
    case, harness, arrays = run.case, run.harness, run.arrays
    count = len(arrays) - case.trained
    if case.trained:
        arrays = (*arrays[:-1], harness.array(_rolled(run, run.inputs.target, -1), case.wide))

    def unfused(*given: Any) -> tuple[Any, ...]:
        return _of_logits(run, run.logits(given[:count]), {"target": given[-1]} if case.trained else {})

    results, gradients = harness.gradients(unfused, arrays, run.upstream)
    if case.trained and case.shift:
        gradients[-1] = harness.array(_rolled(run, harness.numpy(gradients[-1]), 1), case.wide)
    return results, gradients


def _rolled(run: _Run, values: Any, sign: int) -> Any:
    """Return an array (..., T, V) rolled along its rows by the case's shift."""
    return np.roll(values, sign * run.case.shift, -2) if run.case.shift else values


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


def _of_logits(run: _Run, logits: Any, target: Results) -> tuple[Any, ...]:
    """Compute the results of a case in unfused operations on logits.

    The options of row t are those of row t + shift. `target` contains the target if it is differentiable.
    """
    case, found = run.case, {}
    if case.is_divergence:
        found["loss"] = run.harness.unfused_divergence(logits, reduction=case.reduction, **_options_of_divergence(run))
    elif case.function in LOSSES:
        options = placed(run.harness, _options_of_loss(run), case.wide) | target
        found["loss"] = run.harness.unfused_loss(logits, **options, reduction=case.reduction)
    if len(case.results) > len(found):
        found |= run.harness.unfused_rows(logits, **(placed(run.harness, _options_of_rows(run), case.wide) | target))
        found["log_probs"] = 0 - found["nll"]
    return tuple(found[name] for name in case.results)


def _options_of_divergence(run: _Run) -> Results:
    """Return the options, with the teacher's logits or the classes that it knows."""
    options: Results = run.options | placed(run.harness, _weights(run), run.case.wide)
    teacher, kind = options.pop("teacher"), run.case.teacher
    if kind == "logits":
        return options | {"teacher": teacher}
    if kind == "linear":
        logits = run.harness.linear(teacher.input, teacher.weight, teacher.bias)
        bends = {"teacher_softcap": teacher.softcap, "teacher_scale": teacher.logit_scale}
        return options | {"teacher": logits} | bends
    return options | {"ids": teacher.ids, "log_probs": teacher.log_probs, "tail": kind}


def _options_of_loss(run: _Run) -> Results:
    """Return target and options for a call without `shift`."""
    target, shift = run.inputs.target, run.case.shift
    moved = np.roll(target, -shift, len(run.case.rows) - 1) if shift else target
    return run.inputs.options | {"target": moved} | _weights(run)


def _weights(run: _Run) -> Results:
    """Return the sample weights of a call without `shift`, if there are any."""
    shift, given = run.case.shift, run.inputs.options.get("sample_weight")
    if not shift:
        return {} if given is None else {"sample_weight": given}
    here = _has_target(run)
    return {"sample_weight": np.where(here, np.roll(np.ones(here.shape) if given is None else given, -shift, -1), 0.0)}


def _options_of_rows(run: _Run) -> Results:
    """Return the options of log-probabilities, with dense masks that replace ignore_index, `shift` and `support`."""
    inputs, shift = run.inputs, run.case.shift
    here = _has_target(run)
    axis = here.ndim - 1
    if run.case.is_divergence:  # any target: of these results only the entropy is used
        target, ignored = np.zeros(here.shape, np.int64), _weights(run).get("sample_weight", here) == 0
    else:
        target, ignored = np.roll(inputs.target, -shift, axis) if shift else inputs.target, ~here
    if target.dtype.kind != "f":
        ignored = ignored | (target == inputs.options.get("ignore_index", -100))
        target = np.where(ignored, 0, target).astype(np.int64)
    options = {"target": target, "ignored": np.asarray(ignored)}
    options |= {name: inputs.options[name] for name in ("softcap", "logit_scale") if name in inputs.options}
    temperature, support = inputs.options.get("temperature"), inputs.options.get("support")
    if temperature is not None:
        options["temperature"] = np.roll(np.full(here.shape, temperature), -shift, axis if shift else None)
    if support is not None:
        allowed = np.zeros((here.size, run.case.vocabulary), bool)
        for row, (begin, end) in enumerate(pairwise(support.offsets)):
            allowed[row, support.ids[begin:end]] = True
        allowed = np.roll(allowed.reshape(*here.shape, -1), -shift, axis if shift else None)
        options["allowed"] = allowed | ignored[..., None]
    return options


def _has_target(run: _Run) -> Any:
    """Return a mask of the rows that have a target after the shift."""
    here = np.ones(run.case.rows, bool)
    if run.case.shift:
        here[..., max(here.shape[-1] - run.case.shift, 0) :] = False
    return here
