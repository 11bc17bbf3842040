"""Promises of divergences on every backend: rows without weight, strides, and distributions that are equal or apart."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import xent
from tests.calls import call_of, results_of
from tests.covering import crossed
from tests.targets import Target
from xent.command.check.case import Case, Inputs, make_inputs

BETAS = [0.0, 0.3, 1.0]


def spoil(inputs: Inputs, rows: Any) -> None:
    """Make these rows of student and teacher NaN, and give them classes that do not exist."""
    teacher = inputs.target
    next(iter(inputs.differentiable.values()))[rows] = np.nan
    if isinstance(teacher, xent.TopKTeacher):
        teacher.ids[rows] = 99
        teacher.log_probs[rows] = np.nan
    else:
        (teacher.input if isinstance(teacher, xent.LinearTeacher) else teacher)[rows] = np.nan


@pytest.mark.parametrize(
    *crossed(
        function=["divergence", "linear_divergence"],
        teacher=["logits", "linear", "bucket"],
        reduction=["mean", "sum", "none"],
        beta=BETAS,
        chunked=[False, True],
        weights=[(1.0, 0.0, 2.0, 0.0, 1.0, 0.5), (0.0,) * 6],
    )
)
def test_rows_of_weight_0_are_not_read(
    target: Target,
    function: str,
    teacher: str,
    reduction: str,
    beta: float,
    chunked: bool,
    weights: tuple[float, ...],
) -> None:
    """Without any weight, loss and gradients are 0."""
    linear = function == "linear_divergence"
    options = {} if teacher == "bucket" else {"beta": beta}
    workspace = 11 * 4 * 2 if chunked and linear else None
    case = Case(
        function, (6,), 11, "float32", "", options, reduction, teacher=teacher, bias=linear, workspace=workspace
    )
    found, weight = [], np.array(weights)
    for spoilt in (False, True):
        inputs = make_inputs(case)
        inputs.options["sample_weight"] = weight
        if spoilt:
            spoil(inputs, weight == 0)
        found.append(results_of(target, case, inputs))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
        assert other.any() == weight.any()
    assert not found[1][1][weight == 0].any()


@pytest.mark.parametrize("vocabulary", [11, 4097])
@pytest.mark.parametrize("beta", [*BETAS, "tv"])
def test_equal_distributions(target: Target, beta: Any, vocabulary: int) -> None:
    """Also of logits that differ by a constant. A rounding error of p - q would be a sign of total variation."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(0, 2, (6, vocabulary)), rng.normal(size=(vocabulary, 8)), rng.normal(size=(6, 8))
    z, w, x = target.arrays(*drawn)
    options = ({"kind": "tv", "temperature": 0.7} if beta == "tv" else {"beta": beta}) | {"backend": target.name}
    for function, arrays, teacher in (
        (xent.divergence, (z,), z),
        (xent.linear_divergence, (x, w), xent.LinearTeacher(x, w)),
    ):
        loss, gradients = target.harness.gradients(
            lambda *given, f=function, t=teacher: f(*given, t, **options), arrays, None
        )
        for zero in (loss, *gradients):
            assert not target.harness.numpy(zero).any()
    moved = target.harness.numpy(xent.divergence(z, z + 3.0, reduction="none", **options))
    assert (moved >= 0).all()
    assert (moved < (1e-5 if beta == "tv" else 1e-12)).all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_far_distributions_stay_finite(target: Target, beta: float) -> None:
    z, t = target.arrays(
        np.array([[200.0, -200.0, 0.0], [0.0, 0.0, 90.0]]), np.array([[-200.0, 200.0, 0.0], [0.0, 90.0, 0.0]])
    )
    loss, (gradient,) = target.harness.gradients(
        lambda z: xent.divergence(z, t, beta=beta, reduction="none", backend=target.name),
        (z,),
        target.arrays(np.ones(2))[0],
    )
    expected = {0.0: [400.0, 90.0], 1.0: [400.0, 90.0], 0.5: [0.6931472, 0.6931472]}[beta]
    target.close(loss, expected, rtol=1e-6)
    assert np.isfinite(target.harness.numpy(gradient)).all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_classes_that_one_side_excludes(target: Target, beta: float) -> None:
    z, t = target.arrays(np.array([[1.0, -np.inf, 0.0, -np.inf]]), np.array([[-1.0, 0.5, 0.25, -np.inf]]))
    for student, teacher, finite in ((z, t, beta != 0), (t, z, beta != 1)):
        loss, (gradient,) = target.harness.gradients(
            lambda z, t=teacher: xent.divergence(z, t, beta=beta, backend=target.name), (student,), None
        )
        assert np.isfinite(target.harness.numpy(loss)) == finite
        if finite:
            gradient = target.harness.numpy(gradient)
            assert np.isfinite(gradient).all()
            assert abs(gradient.sum()) < 1e-6


def test_classes_on_another_axis(target: Target) -> None:
    case = Case("divergence", (2, 3), 11, "float32", "", {"sample_weight": True}, "none")
    inputs = make_inputs(case)
    turned = replace(
        inputs,
        differentiable={"logits": inputs.differentiable["logits"].swapaxes(1, 2)},
        target=inputs.target.swapaxes(1, 2),
    )
    (loss, gradient), (found, made) = results_of(target, case, inputs), results_of(target, case, turned, axis=1)
    np.testing.assert_allclose(found, loss, rtol=0, atol=1e-6)
    np.testing.assert_allclose(made.swapaxes(1, 2), gradient, rtol=0, atol=1e-6)


def test_bfloat16_logits_of_both_sides_are_exact(target: Target) -> None:
    case = Case("linear_divergence", (16,), 301, "bfloat16", "", hidden=64, reduction="none")
    inputs = make_inputs(case)
    _, (x, w) = call_of(target, case, inputs)
    (other,) = target.arrays(target.harness.numpy(w) * 1.01, dtype="bfloat16")
    found = xent.linear_divergence(x, w, xent.LinearTeacher(x, other), reduction="none", backend=target.name)
    hidden, classifier, taught = (target.harness.numpy(one).astype(np.float64) for one in (x, w, other))
    truth = xent.linear_divergence(hidden, classifier, xent.LinearTeacher(hidden, taught), reduction="none")
    target.close(found, truth, rtol=1e-3)
