"""Results and gradients of one case from the reference, from a backend, and from the framework's unfused operations.

For log-probabilities of hidden states, the unfused computation begins with the framework's float32 product. So a
log-probability may have the error of float32 logits. Its gradients may have the error of float32 logits whose gradient
is rounded to the case's dtype.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from xent.backends.protocol import Backend, Harness
from xent.backends.reference import (
    BACKEND,
    cross_entropy_gradient,
    linear_cross_entropy_gradients,
    target_gradient,
)
from xent.core import api, log_probs
from xent.core.call import Call, Given
from xent.core.check.cases import LOSSES, Case, Inputs, make_inputs
from xent.core.describe import as_log_probs, linear_loss_call, loss_call
from xent.core.spec import Support

__all__ = ["ALONE", "Results", "call_of", "function_of", "placed", "results_of_case"]

ALONE = " without gradients"
"""The suffix for names of results that were computed without gradients."""

Results = dict[str, Any]

_DEFAULTS: Results = {
    "weight": None,
    "sample_weight": None,
    "normalizer": None,
    "reduction": "none",
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "softcap": None,
    "logit_scale": 1.0,
    "stats": (),
}


def function_of(name: str) -> Any:
    """Return a public function by its name."""
    return getattr(api if name in LOSSES else log_probs, name)


def placed(harness: Harness[Any], options: Results, wide: str) -> Results:
    """Return options (and the target) with arrays moved to the device and floats converted to `wide`."""

    def place(value: Any) -> Any:
        if isinstance(value, Support):
            return Support(harness.array(value.ids), harness.array(value.offsets))
        if not isinstance(value, np.ndarray):
            return value
        return harness.array(value, wide if value.dtype.kind == "f" else None)

    return {name: place(value) for name, value in options.items()}


def call_of(case: Case, differentiable: Results, options: Results) -> Call:
    """Return the validated call of a case on NumPy arrays. `options` includes the target."""
    options = dict(options)
    temperature, support = options.pop("temperature", 1.0), options.pop("support", None)
    options = _DEFAULTS | options | {name: case.keywords[name] for name in case.keywords.keys() - {"entropy"}}
    options.setdefault("linear_bias", None)
    if case.is_linear:
        call = linear_loss_call(**(options | differentiable))
    else:
        del options["linear_bias"]
        call = loss_call(**differentiable, **options, axis=-1, inplace=False)
    if case.function not in LOSSES:
        call = as_log_probs(call, (options | differentiable)["target"], temperature, support, case.results[1:])
    return call


def results_of_case(
    backend: Backend, harness: Harness[Any], case: Case, seed: int = 0, workspace: int | None = None
) -> tuple[Results, Results, Results, Results]:
    """Return (reference, backend, unfused, sizes); the first three contain results and gradients by name.

    `sizes` contains the size of each row of the gradients: the sum of the norms of the contributions of each result.
    Contributions may cancel, so an error may be small compared with them and large compared with their sum. The two
    terms of the entropy's gradient, p log p and p H, may cancel too, and their errors are those of x. So the entropy
    counts with the size of p in addition.
    """
    case = replace(case, workspace=case.workspace if workspace is None else workspace)
    run = _Run.drawn(harness, case, seed)

    def fused(*arrays: Any) -> tuple[Any, ...]:
        named = dict(zip(run.inputs.differentiable, arrays, strict=True))
        return run.in_order(function_of(case.function)(**named, **run.options, **case.keywords, backend=backend.name))

    truth, sizes = _reference(run)
    made = run.named(harness.gradients(fused, run.arrays, run.upstream))
    plain = run.named(_unfused(run))
    if case.function == "linear_log_probs":
        plain |= _exact(run)
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
    wide: str
    """The dtype of results, of upstream gradients and of options that are arrays."""
    arrays: tuple[Any, ...]
    """The differentiable arrays; the target is the last one if it is differentiable."""
    options: Results
    """The options, and the target unless it is differentiable."""
    upstream: tuple[Any, ...]
    """An upstream gradient for each result; None if it is missing."""

    @classmethod
    def drawn(cls, harness: Harness[Any], case: Case, seed: int) -> "_Run":
        """Draw the arrays in the case's dtype."""
        inputs = make_inputs(case, seed)
        wide = "float64" if case.dtype == "float64" else "float32"
        arrays = tuple(harness.array(value, case.dtype) for value in inputs.differentiable.values())
        if case.trained:
            inputs = replace(inputs, differentiable=inputs.differentiable | {"target": inputs.target})
            arrays = (*arrays, harness.array(inputs.target, wide))
        options = placed(harness, inputs.options | ({} if case.trained else {"target": inputs.target}), wide)
        given = {case.results[0]: inputs.upstream} | inputs.others
        found = (given.get(name) for name in case.results)
        upstream = tuple(None if values is None else harness.array(values, wide) for values in found)
        return cls(harness, case, inputs, wide, arrays, options, upstream)

    def in_order(self, returned: Any) -> tuple[Any, ...]:
        """Return the differentiable results of a call as a tuple, in order."""
        return tuple(self.case.found_in(returned)[name] for name in self.case.results)

    def named(self, found: tuple[tuple[Any, ...], list[Any]]) -> Results:
        """Return results and gradients by name, as NumPy arrays."""
        results, gradients = found
        names = (*self.case.results, *self.inputs.differentiable)
        return dict(zip(names, map(self.harness.numpy, (*results, *gradients)), strict=True))


def _reference(run: _Run) -> tuple[Results, Results]:
    """Compute the reference from the backend's inputs, which are rounded to the case's dtype.

    Return results and sizes.
    """
    case, numpy = run.case, run.harness.numpy
    arrays = dict(zip(run.inputs.differentiable, map(numpy, run.arrays), strict=True))
    options = {name: _as_numpy(run.harness, value) for name, value in run.options.items()}
    call = call_of(case, arrays, options)
    loss, stats = BACKEND.run(call)
    sign = 1 if case.function in LOSSES else -1
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
    made: Results
    if isinstance(call.source, Given):
        made = {"logits": cross_entropy_gradient(call, upstream, **others)}
    else:
        parts = linear_cross_entropy_gradients(call, upstream, **others)
        made = dict(zip(("input", "linear_weight", "linear_bias"), parts, strict=True))
    if "target" in names:
        made["target"] = target_gradient(call, upstream, **others)
    return {name: made[name] for name in names}


def _as_numpy(harness: Harness[Any], value: Any) -> Any:
    if isinstance(value, Support):
        return Support(harness.numpy(value.ids), harness.numpy(value.offsets))
    return value if value is None or np.isscalar(value) else harness.numpy(value)


def _unfused(run: _Run) -> tuple[tuple[Any, ...], list[Any]]:
    """Compute in the framework's own operations, with logits in the case's dtype."""
    case, harness, arrays = run.case, run.harness, run.arrays
    count = len(arrays) - case.trained
    if case.trained:
        arrays = (*arrays[:-1], harness.array(_rolled(run, run.inputs.target, -1), run.wide))

    def unfused(*given: Any) -> tuple[Any, ...]:
        padded = (*given[:count], *(None,) * (3 - count))
        target = {"target": given[-1]} if case.trained else {}
        return _of_logits(run, harness.linear(*padded) if case.is_linear else given[0], target)

    results, gradients = harness.gradients(unfused, arrays, run.upstream)
    if case.trained and case.shift:
        gradients[-1] = harness.array(_rolled(run, harness.numpy(gradients[-1]), 1), run.wide)
    return results, gradients


def _rolled(run: _Run, values: Any, sign: int) -> Any:
    """Return an array (..., T, V) rolled along its rows by the case's shift."""
    return np.roll(values, sign * run.case.shift, -2) if run.case.shift else values


def _exact(run: _Run) -> Results:
    """Compute with logits in the dtype `wide`. Their gradient is rounded to the case's dtype."""
    harness, dtype = run.harness, run.case.dtype

    def product(*given: Any) -> Any:
        return harness.linear(*given, *(None,) * (3 - len(given)))

    def rounded(values: Any) -> Any:
        return harness.array(harness.numpy(values), dtype)

    wide = tuple(harness.array(harness.numpy(array), run.wide) for array in run.arrays)
    results, (grad,) = harness.gradients(lambda logits: _of_logits(run, logits, {}), (product(*wide),), run.upstream)
    _, gradients = harness.gradients(product, wide, harness.array(harness.numpy(rounded(grad)), run.wide))
    return run.named((results, list(map(rounded, gradients))))


def _of_logits(run: _Run, logits: Any, target: Results) -> tuple[Any, ...]:
    """Compute the results of a case in unfused operations on logits.

    The options of row t are those of row t + shift. `target` contains the target if it is differentiable.
    """
    found = {}
    if run.case.function in LOSSES:
        options = placed(run.harness, _options_of_loss(run), run.wide) | target
        found["loss"] = run.harness.unfused_loss(logits, **options, reduction=run.case.reduction)
    if len(run.case.results) > len(found):
        found |= run.harness.unfused_rows(logits, **(placed(run.harness, _options_of_rows(run), run.wide) | target))
        found["log_probs"] = 0 - found["nll"]
    return tuple(found[name] for name in run.case.results)


def _options_of_loss(run: _Run) -> Results:
    """Return target and options for a call without `shift`."""
    inputs, shift = run.inputs, run.case.shift
    options = inputs.options | {"target": inputs.target}
    if shift:
        here = _has_target(run)
        options["target"] = np.roll(inputs.target, -shift, here.ndim - 1)
        weights = np.roll(options.get("sample_weight", np.ones(here.shape)), -shift, -1)
        options["sample_weight"] = np.where(here, weights, 0.0)
    return options


def _options_of_rows(run: _Run) -> Results:
    """Return the options of log-probabilities, with dense masks that replace ignore_index, `shift` and `support`."""
    inputs, shift = run.inputs, run.case.shift
    here = _has_target(run)
    axis = here.ndim - 1
    target = np.roll(inputs.target, -shift, axis) if shift else inputs.target
    ignored = ~here
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
