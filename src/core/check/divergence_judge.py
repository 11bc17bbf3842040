"""Compare divergences and their gradients with the reference, with the bounds that `judge` uses for losses."""

from dataclasses import replace
from typing import Any

import numpy as np

from xent.backends.protocol import Backend, Harness
from xent.backends.reference_divergence import divergence, divergence_gradients, student_entropy
from xent.core import divergence as public
from xent.core.check.cases import Case
from xent.core.check.divergence_cases import DivergenceCase, make_divergence_inputs
from xent.core.check.judge import Comparison, compare, typical_of
from xent.core.describe_divergence import divergence_call, linear_divergence_call
from xent.core.teachers import LinearTeacher, TopKTeacher

__all__ = ["judge_divergence"]

# More draws than for a loss: if teacher and student nearly agree, a gradient is a small difference of large numbers,
# and a few rows decide the worst error.
_DRAWS = 24
Results = dict[str, Any]


def judge_divergence(backend: Backend, harness: Harness[Any], case: DivergenceCase, seed: int = 0) -> list[Comparison]:
    """Run a case on a backend, and compare the divergence and every gradient with the reference."""
    draws = [_judge_draw(backend, harness, case, seed)]
    if not all(comparison.passed for comparison in draws[0]):
        draws += [_judge_draw(backend, harness, case, seed + more) for more in range(1, _DRAWS)]
    return [typical_of(same) for same in zip(*draws, strict=True)]


def _judge_draw(backend: Backend, harness: Harness[Any], case: DivergenceCase, seed: int) -> list[Comparison]:
    inputs = make_divergence_inputs(case, seed)
    wide = "float64" if case.dtype == "float64" else "float32"
    names = tuple(inputs.differentiable)
    arrays = tuple(harness.array(value, case.dtype) for value in inputs.differentiable.values())
    upstream = harness.array(inputs.upstream, wide)
    teacher = {
        name: harness.array(value, None if name == "ids" else wide if name == "log_probs" else case.dtype)
        for name, value in inputs.teacher.items()
    }
    options = {
        name: harness.array(value, wide) if isinstance(value, np.ndarray) else value
        for name, value in inputs.options.items()
    }

    def fused(*differentiable: Any) -> Any:
        call = dict(zip(names, differentiable, strict=True)) | options
        if case.function == "linear_divergence":
            call["workspace"] = case.workspace
        stats = ("entropy",) if case.entropy else ()
        made = getattr(public, case.function)(
            **call, teacher=_teacher_of(case, teacher), reduction=case.reduction, stats=stats, backend=backend.name
        )
        return (made[0], made[1].entropy) if case.entropy else (made,)

    def unfused(*differentiable: Any) -> Any:
        logits = differentiable[0]
        if case.function == "linear_divergence":
            logits = harness.linear(*differentiable, *(None,) * (3 - len(differentiable)))
        other = {name: value for name, value in teacher.items() if name in ("ids", "log_probs")}
        if not other:
            other["teacher"] = teacher.get("teacher")
        if case.teacher == "linear":
            other["teacher"] = harness.linear(teacher["input"], teacher["weight"], teacher.get("bias"))
            other |= {"teacher_softcap": case.teacher_softcap, "teacher_scale": case.teacher_scale}
        tail = case.teacher if "ids" in teacher else ""
        return (harness.unfused_divergence(logits, **other, tail=tail, reduction=case.reduction, **options),)

    truth = _reference(harness, case, dict(zip(names, arrays, strict=True)), teacher, options, upstream)
    made: Results = {}
    plain: Results = {}
    for results, function in ((made, fused), (plain, unfused)):
        found, gradients = harness.gradients(
            function, arrays, (upstream, None)[: 1 + (case.entropy and results is made)]
        )
        results |= dict(zip(("loss", "entropy"), map(harness.numpy, found), strict=False))
        results |= {name: harness.numpy(grad) for name, grad in zip(names, gradients, strict=True)}
    if case.entropy:
        plain["entropy"] = _unfused_entropy(harness, case, arrays, inputs.options)
    judged_as = Case("cross_entropy" if case.function == "divergence" else case.function, (), 1, case.dtype, "")
    of_rows = replace(judged_as, function="log_probs", entropy=True)
    return [
        compare(name, made[name], truth[name], plain[name], of_rows if name == "entropy" else judged_as)
        for name in truth
    ]


def _unfused_entropy(harness: Harness[Any], case: DivergenceCase, arrays: tuple[Any, ...], options: Results) -> Any:
    """Return the student's entropy, computed in framework operations from float32 or float64 logits."""
    wide = "float64" if case.dtype == "float64" else "float32"
    given = [harness.array(harness.numpy(array), wide) for array in arrays]
    logits = harness.linear(*given, *(None,) * (3 - len(given))) if case.function == "linear_divergence" else given[0]
    ignored = np.asarray(options.get("sample_weight", np.ones(case.rows)) == 0)
    temperature = harness.array(np.full(case.rows, options.get("temperature", 1.0)), wide)
    bends = {name: options[name] for name in ("softcap", "logit_scale") if name in options}
    target, ignored = harness.array(np.zeros(case.rows, np.int64)), harness.array(ignored)
    return harness.numpy(harness.unfused_rows(logits, target, ignored, temperature=temperature, **bends)["entropy"])


def _teacher_of(case: DivergenceCase, arrays: Results) -> Any:
    if case.teacher == "logits":
        return arrays["teacher"]
    if case.teacher == "linear":
        return LinearTeacher(**arrays, softcap=case.teacher_softcap, logit_scale=case.teacher_scale)
    return TopKTeacher(**arrays, tail=case.teacher)


def _reference(
    harness: Harness[Any], case: DivergenceCase, arrays: Results, teacher: Results, options: Results, upstream: Any
) -> Results:
    """Return the reference results, computed from the backend's inputs, which are rounded to the case's dtype."""
    arguments = {name: harness.numpy(value) for name, value in arrays.items()}
    known = _teacher_of(case, {name: harness.numpy(value) for name, value in teacher.items()})
    given: Results = {"beta": 0.0, "temperature": 1.0, "softcap": None, "logit_scale": 1.0, "sample_weight": None}
    given |= {"normalizer": None, "reduction": case.reduction}
    given |= {
        name: value if value is None or np.isscalar(value) else harness.numpy(value) for name, value in options.items()
    }
    if case.function == "divergence":
        call = divergence_call(**arguments, teacher=known, axis=-1, **given)
    else:
        linear: Results = {"linear_bias": None} | arguments
        call = linear_divergence_call(**linear, teacher=known, shift=0, workspace=None, **given)
    gradients = divergence_gradients(call, harness.numpy(upstream))
    entropy = {"entropy": student_entropy(call)} if case.entropy else {}
    return {"loss": np.asarray(divergence(call))} | entropy | {name: gradients[name] for name in arrays}
