"""Verify the reference of divergences by finite differences and known values."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

import xent
from tests.divergence.cases import TEACHERS
from tests.test_reference import slopes
from xent.backends.reference import gradients
from xent.backends.reference_divergence import between
from xent.command.check.case import Case, make_inputs
from xent.command.check.judge import call_of

BASE = Case(
    "",
    (2, 3),
    7,
    "float64",
    "",
    hidden=3,
    teacher_hidden=4,
    classes=4,
    bias=True,
    teacher_softcap=4.0,
    teacher_scale=0.7,
)
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 2.5},
    "softcap, scale": {"softcap": 3.0, "logit_scale": -1.5},
    "weights": {"sample_weight": True},
    "normalizer": {"normalizer": 3.5},
}
KL, TV = {"beta": 0.0}, {"kind": "tv"}
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "logits": (KL, {"beta": 1.0}, {"beta": 0.3}, TV),
    "linear": (KL, {"beta": 1.0}, {"beta": 0.3}, TV),
    "bucket": (KL, TV),
    "renormalize": (KL, TV),
    "drop": (KL,),
}
CASES = [
    replace(BASE, function=function, teacher=teacher, reduction=reduction, name=name, options=kind | options)
    for function in ("divergence", "linear_divergence")
    for teacher in TEACHERS
    for kind in KINDS[teacher]
    for reduction, (name, options) in zip(("mean", "none", "sum", "mean", "mean"), OPTIONS.items(), strict=True)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_equals_finite_differences(case: Case) -> None:
    inputs = make_inputs(case)

    def total(**differentiable: Any) -> Any:
        call = getattr(xent, case.function)
        return (
            call(**differentiable, teacher=inputs.target, reduction=case.reduction, **inputs.options) * inputs.upstream
        ).sum()

    call = call_of(case, inputs.differentiable, inputs.options | {"teacher": inputs.target})
    analytic = gradients(call, inputs.upstream)
    for name, numeric in slopes(total, inputs.differentiable).items():
        np.testing.assert_allclose(analytic[name], numeric, rtol=1e-6, atol=2e-8)


def test_known_values() -> None:
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.25, 0.5]])
    forward = 0.25 * np.log(0.5) + 0.5 * np.log(2)
    assert xent.divergence(np.log(p), np.log(q)) == pytest.approx(forward)
    assert xent.divergence(np.log(p), np.log(q), beta=1.0) == pytest.approx(0.5 * np.log(2) + 0.25 * np.log(0.5))
    m = (p + q) / 2
    halves = (q * np.log(q / m)).sum() / 2 + (p * np.log(p / m)).sum() / 2
    assert xent.divergence(np.log(p), np.log(q), beta=0.5) == pytest.approx(halves)


def test_total_variation() -> None:
    """Its known value, also that of K + 1 cells; 1 minus it is the share of tokens that sampling from p keeps."""
    p, q = np.array([[0.5, 0.3, 0.15, 0.05]]), np.array([[0.4, 0.25, 0.05, 0.3]])
    assert xent.divergence(np.log(p), np.log(q), kind="tv") == pytest.approx(0.25)
    assert xent.divergence(np.log(p), np.log(q), kind="tv") == pytest.approx(1 - np.minimum(p, q).sum())
    assert xent.divergence(np.log(p), np.log(p), kind="tv") == 0
    known = np.array([[3, 0]]), np.log(q[:, [3, 0]])
    assert xent.divergence(np.log(p), xent.TopKTeacher(*known), kind="tv") == pytest.approx(0.25)
    renormalized = xent.TopKTeacher(*known, tail="renormalize")
    expected = (abs(0.05 - 3 / 7) + abs(0.5 - 4 / 7) + 0.45) / 2
    assert xent.divergence(np.log(p), renormalized, kind="tv") == pytest.approx(expected)


def test_bucket_is_one_class() -> None:
    p, q = np.array([[0.5, 0.3, 0.15, 0.05]]), np.array([[0.4, 0.25, 0.05, 0.3]])
    top = xent.TopKTeacher(np.array([[3, 0]]), np.log(q[:, [3, 0]]))
    cells_p, cells_q = np.array([[0.05, 0.5, 0.45]]), np.array([[0.3, 0.4, 0.3]])
    expected = (cells_q * np.log(cells_q / cells_p)).sum()
    assert xent.divergence(np.log(p), top) == pytest.approx(expected)
    assert 0 <= xent.divergence(np.log(p), top) <= xent.divergence(np.log(p), np.log(q))
    renormalized = xent.divergence(np.log(p), xent.TopKTeacher(top.ids, top.log_probs, tail="renormalize"))
    assert renormalized == pytest.approx(3 / 7 * np.log(3 / 7 / 0.05) + 4 / 7 * np.log(4 / 7 / 0.5))
    dropped = xent.divergence(np.log(p), xent.TopKTeacher(top.ids, top.log_probs, tail="drop"))
    assert dropped == pytest.approx(0.3 * np.log(6) + 0.4 * np.log(0.8))


def test_top_k_teacher_with_all_classes_equals_its_logits() -> None:
    rng = np.random.default_rng(0)
    z, t = rng.normal(size=(4, 6)), rng.normal(size=(4, 6))
    log_q = t - np.logaddexp.reduce(t, -1, keepdims=True)
    ids = np.argsort(t, -1)
    for tail in ("bucket", "renormalize", "drop"):
        top = xent.TopKTeacher(ids, np.take_along_axis(log_q, ids, -1), tail=tail)
        assert xent.divergence(z, top) == pytest.approx(float(xent.divergence(z, t)))


@pytest.mark.parametrize("beta", [0.1, 0.3, 0.9])
def test_divergence_of_close_distributions_equals_exact_arithmetic(beta: float) -> None:
    """The mean over rows has hardly any rounding error. An error that all classes share would remain."""
    logits = np.random.default_rng(0).normal(size=(24, 67))
    x = np.stack((logits, logits + np.random.default_rng(1).normal(scale=0.3, size=logits.shape)))
    log_p, log_q = x - np.logaddexp.reduce(x, -1, keepdims=True)
    exact, share = Decimal(0), Decimal(beta)
    for log_p_c, log_q_c in zip(log_p.flat, log_q.flat, strict=True):
        of_p, of_q = Decimal(float(log_p_c)), Decimal(float(log_q_c))
        p, q = of_p.exp(), of_q.exp()
        log_m = ((1 - share) * p + share * q).ln()
        exact += share * q * (of_q - log_m) + (1 - share) * p * (of_p - log_m)
    loss, _ = between(log_p, log_q, "kl", beta)
    np.testing.assert_allclose(loss.sum(), float(exact), rtol=1e-14)
