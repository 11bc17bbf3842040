"""Results of divergences beyond the matrix: the student's entropy, and logits far from 0."""

import numpy as np
import pytest

import xent
from tests.targets import Target


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_entropy(target: Target, reduction: str) -> None:
    """The student's entropy per row, 0 for weight 0. The loss is the same without it."""
    rng = np.random.default_rng(0)
    logits, teacher = rng.normal(0, 2, (2, 3, 5)), rng.normal(0, 2, (2, 3, 5))
    weight = np.array([[1.0, 0.0, 2.0], [0.5, 1.0, 1.0]])
    z, t, a = target.arrays(logits, teacher, weight)
    options = {"sample_weight": a, "reduction": reduction, "backend": target.name}
    plain = xent.divergence(z, t, temperature=2.0, **options)
    loss, stats = xent.divergence(z, t, temperature=2.0, stats=["entropy"], **options)
    log_p = logits / 2 - np.logaddexp.reduce(logits / 2, -1, keepdims=True)
    expected = np.where(weight == 0, 0.0, -(np.exp(log_p) * log_p).sum(-1))
    target.close(stats.entropy, expected, rtol=1e-5)
    target.same(loss, plain)
    assert {name for name, value in vars(stats).items() if value is not None} == {"entropy"}
    assert not getattr(stats.entropy, "requires_grad", False)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, "bucket"])
@pytest.mark.parametrize("linear", [False, True])
def test_entropy_is_computed_if_the_divisor_is_0(target: Target, beta: float | str, linear: bool) -> None:
    """Loss and gradients are 0 although the divergence of the first row is infinite, and that of the second is NaN."""
    rng = np.random.default_rng(0)
    hidden, weight, teacher = rng.normal(0, 1, (4, 3)), rng.normal(0, 1, (70, 3)), rng.normal(0, 2, (4, 70))
    teacher[0, 5] = -np.inf
    hidden[1], normalizer = np.nan, np.array(0.0)
    given = (hidden, weight) if linear else (hidden @ weight.T,)
    *arrays, t, n, ids = target.arrays(*given, teacher, normalizer, np.tile(np.arange(3), (4, 1)))
    log_q = target.arrays(np.log(np.full((4, 3), 0.25)))[0]
    known = xent.TopKTeacher(ids, log_q, tail="bucket") if isinstance(beta, str) else t
    options = {"beta": 0.0 if isinstance(beta, str) else beta, "normalizer": n, "backend": target.name}
    function = xent.linear_divergence if linear else xent.divergence
    loss, gradients = target.harness.gradients(
        lambda *arrays: function(*arrays, known, stats=["entropy"], **options)[0], tuple(arrays), None
    )
    _, stats = function(*arrays, known, stats=["entropy"], **options)
    with np.errstate(invalid="ignore"):
        log_p = hidden @ weight.T
        log_p = log_p - np.logaddexp.reduce(log_p, -1, keepdims=True)
    expected = -(np.exp(log_p) * log_p).sum(-1)
    target.close(stats.entropy, expected, rtol=1e-5)
    for zero in (loss, *gradients):
        target.same(zero, 0.0)


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
@pytest.mark.parametrize("moved", [-200.0, 200.0])
def test_teacher_with_all_classes_and_logits_far_from_0(target: Target, tail: str, moved: float) -> None:
    rng = np.random.default_rng(0)
    logits, ids = rng.integers(-3, 3, (2, 5)) + moved, np.broadcast_to(np.arange(5), (2, 5)).copy()
    log_q = rng.normal(size=(2, 5))
    log_q = log_q - np.logaddexp.reduce(log_q, -1, keepdims=True)
    z, known, log_probs = target.arrays(logits, ids, log_q)
    made, (gradient,) = target.harness.gradients(
        lambda z: xent.divergence(z, xent.TopKTeacher(known, log_probs, tail=tail), backend=target.name), (z,), None
    )
    expected = xent.divergence(logits, xent.TopKTeacher(ids, log_q, tail=tail))
    target.close(made, expected, rtol=1e-4)
    assert np.isfinite(target.harness.numpy(gradient)).all()
