"""Whether a loss and its gradients are right: against the float64 reference, by the framework's own rounding error.

The reference computes from the very numbers that the backend sees, rounded to the case's dtype. A gradient is judged
row by row, relative to the row: its worst error may be 1.5 times the worst that the framework's unfused computation
makes on the same inputs, plus two units in the last place. Rows whose gradient is exactly zero must be exactly zero. A
zero, negated, doubled or row-shifted gradient is far beyond that in every dtype.

A few rows may be rounded well by chance, on one processor and not on another. So where one draw of the inputs is not
within its bound, the worst errors of both over several draws decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xent.backends.protocol import Backend, Harness
from xent.backends.reference import BACKEND, cross_entropy_gradient, linear_cross_entropy_gradients
from xent.core import api, validate
from xent.core.check.cases import Case, Inputs, make_inputs

__all__ = ["Comparison", "compare", "judge_case", "results_of_case", "worst_of"]

_SLACK = 1.5
_DRAWS = 8
_UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
# The float64 reference rounds as a float64 backend does, so there the two differ by the rounding of both.
_UNITS_ALLOWED = {"float16": 2, "bfloat16": 2, "float32": 2, "float64": 64}

_ALONE = "loss without gradients"
_LOSSES = ("loss", _ALONE)

Results = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """One output of one case: its error and what it may be."""

    output: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= self.bound


def judge_case(
    backend: Backend, harness: Harness[Any], case: Case, seed: int = 0, workspace: int | None = None
) -> list[Comparison]:
    """Run a case on a backend and compare its loss and every gradient."""
    draws = [_judge_draw(backend, harness, case, seed, workspace)]
    if not all(comparison.passed for comparison in draws[0]):
        draws += [_judge_draw(backend, harness, case, seed + more, workspace) for more in range(1, _DRAWS)]
    return [worst_of(same) for same in zip(*draws, strict=True)]


def _judge_draw(
    backend: Backend, harness: Harness[Any], case: Case, seed: int, workspace: int | None
) -> list[Comparison]:
    truth, made, plain = results_of_case(backend, harness, case, seed, workspace)
    return [compare(name, made[name], truth[name], plain[name], case) for name in truth]


def worst_of(draws: Sequence[Comparison]) -> Comparison:
    """Return the worst error and the largest bound of several draws of one output."""
    errors, bounds = zip(*((draw.error, draw.bound) for draw in draws), strict=True)
    return Comparison(draws[0].output, float(np.max(errors)), float(np.max(bounds)))


def results_of_case(
    backend: Backend, harness: Harness[Any], case: Case, seed: int = 0, workspace: int | None = None
) -> tuple[Results, Results, Results]:
    """Return loss and gradients of the reference, of the backend, and of the framework's unfused computation."""
    inputs = make_inputs(case, seed)
    workspace = case.workspace if workspace is None else workspace
    wide = "float64" if case.dtype == "float64" else "float32"
    names = tuple(inputs.differentiable)
    arrays = tuple(harness.array(value, case.dtype) for value in inputs.differentiable.values())
    upstream = harness.array(inputs.upstream, wide)
    target, options = _placed(harness, inputs, wide)

    def fused(*differentiable: Any) -> Any:
        call = dict(zip(names, differentiable, strict=True)) | options | _linear_only(case, workspace)
        return getattr(api, case.function)(**call, target=target, reduction=case.reduction, backend=backend.name)

    def unfused(*differentiable: Any) -> Any:
        logits = differentiable[0]
        if case.function == "linear_cross_entropy":
            logits = harness.linear(*differentiable, *(None,) * (3 - len(differentiable)))
        moved_target, moved_options = _placed(harness, _moved(inputs, case.shift), wide)
        return harness.unfused_loss(logits, moved_target, reduction=case.reduction, **moved_options)

    as_numpy = {name: harness.numpy(array) for name, array in zip(names, arrays, strict=True)}
    truth = _reference(case, as_numpy, harness.numpy(target), _as_numpy(harness, options), harness.numpy(upstream))
    made = _named(harness, names, harness.gradients(fused, arrays, upstream))
    plain = _named(harness, names, harness.gradients(unfused, arrays, upstream))
    if case.alone:
        made[_ALONE] = harness.numpy(fused(*arrays))
        truth[_ALONE], plain[_ALONE] = truth["loss"], plain["loss"]
    return truth, made, plain


def compare(output: str, made: Any, truth: Any, plain: Any, case: Case) -> Comparison:
    """Compare one output with the truth, bounded by the error of the plain computation."""
    dtype = case.dtype
    if output in _LOSSES and case.function == "cross_entropy" and dtype != "float64":
        dtype = "float32"
    bound = _SLACK * _worst(plain, truth, output) + _UNITS_ALLOWED[dtype] * _UNITS[dtype]
    return Comparison(output, _worst(made, truth, output) if made.shape == truth.shape else np.inf, bound)


def _worst(values: Any, truth: Any, output: str) -> float:
    """Return the worst error of any row, relative to the row; of a loss, relative to the largest loss."""
    if not truth.size:
        return 0.0
    if output in _LOSSES:
        return float(np.abs(values - truth).max() / max(np.abs(truth).max(), 1e-30))
    error = np.linalg.norm(np.atleast_2d(values - truth), axis=-1)
    size = np.linalg.norm(np.atleast_2d(truth), axis=-1)
    relative = np.where(size > 0, error / np.where(size > 0, size, 1.0), np.where(error > 0, np.inf, error))
    return float(relative.max())


def _reference(case: Case, differentiable: Results, target: Any, options: Results, upstream: Any) -> Results:
    loss_options: dict[str, Any] = {
        "weight": None,
        "sample_weight": None,
        "normalizer": None,
        "reduction": case.reduction,
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "softcap": None,
        "logit_scale": 1.0,
        "stats": (),
    } | options
    if case.function == "cross_entropy":
        call = validate.logits_call(**differentiable, target=target, axis=-1, inplace=False, **loss_options)
        return {"loss": np.asarray(BACKEND.run(call)[0]), "logits": cross_entropy_gradient(call, upstream)}
    arrays = {"linear_bias": None} | differentiable
    linear = validate.linear_call(**arrays, target=target, shift=case.shift, workspace=None, **loss_options)
    gradients = linear_cross_entropy_gradients(linear, upstream)
    named: Results = dict(zip(("input", "linear_weight", "linear_bias"), gradients, strict=True))
    return {"loss": np.asarray(BACKEND.run(linear)[0])} | {name: named[name] for name in differentiable}


def _moved(inputs: Inputs, shift: int) -> Inputs:
    """Return inputs whose row t has the target of row t + shift, as a caller without `shift` would build them."""
    if not shift:
        return inputs
    options, target = dict(inputs.options), inputs.target
    axis = -2 if target.dtype.kind == "f" else -1
    rows = target.shape[:axis] + target.shape[axis : axis + 1 or None]
    here = np.arange(rows[-1]) < rows[-1] - shift
    sample_weight = options.get("sample_weight", np.ones(rows))
    options["sample_weight"] = np.where(here, np.roll(sample_weight, -shift, -1), 0.0)
    return Inputs(inputs.differentiable, np.roll(target, -shift, axis), options, inputs.upstream)


def _placed(harness: Harness[Any], inputs: Inputs, wide: str) -> tuple[Any, Results]:
    """Return target and options with their arrays on the device."""
    target = harness.array(inputs.target, wide if inputs.target.dtype.kind == "f" else None)
    options = {
        name: harness.array(value, wide) if isinstance(value, np.ndarray) else value
        for name, value in inputs.options.items()
    }
    return target, options


def _as_numpy(harness: Harness[Any], options: Results) -> Results:
    return {name: value if np.isscalar(value) else harness.numpy(value) for name, value in options.items()}


def _linear_only(case: Case, workspace: int | None) -> Results:
    return {"shift": case.shift, "workspace": workspace} if case.function == "linear_cross_entropy" else {}


def _named(harness: Harness[Any], names: tuple[str, ...], result: tuple[Any, list[Any]]) -> Results:
    loss, gradients = result
    return {"loss": harness.numpy(loss)} | {
        name: harness.numpy(grad) for name, grad in zip(names, gradients, strict=True)
    }
