"""Results of divergences beyond the matrix: the student's entropy, and logits far from 0."""

from typing import Any

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
    options: dict[str, Any] = {"sample_weight": a, "reduction": reduction, "backend": target.name}
    plain = xent.divergence(z, t, temperature=2.0, **options)
    loss, stats = xent.divergence(z, t, temperature=2.0, stats=["entropy"], **options)
    log_p = logits / 2 - np.logaddexp.reduce(logits / 2, -1, keepdims=True)
    expected = np.where(weight == 0, 0.0, -(np.exp(log_p) * log_p).sum(-1))
    np.testing.assert_allclose(target.harness.numpy(stats.entropy), expected, rtol=1e-5)
    np.testing.assert_array_equal(target.harness.numpy(loss), target.harness.numpy(plain))
    assert {name for name, value in vars(stats).items() if value is not None} == {"entropy"}
    assert not getattr(stats.entropy, "requires_grad", False)


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
    np.testing.assert_allclose(target.harness.numpy(made), expected, rtol=1e-4)
    assert np.isfinite(target.harness.numpy(gradient)).all()
