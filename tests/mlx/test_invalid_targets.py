"""A target outside [0, V) is never used as an index: its row's results are NaN, and it is not a correct prediction."""

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.targets import Target

LOGITS = mx.array([[5.0, 0.0, 1.0], [5.0, 0.0, 1.0], [5.0, 0.0, 1.0]])


@pytest.mark.parametrize("wrong", [3, -1, 2**30])
def test_statistics(target: Target, wrong: int) -> None:
    _, stats = xent.cross_entropy(LOGITS, mx.array([0, wrong, 1]), stats=("nll", "accuracy"), backend=target.name)
    np.testing.assert_array_equal(np.isnan(np.array(stats.nll)), [False, True, False])
    assert stats.accuracy.item() == pytest.approx(1 / 3)


def test_weight_of_zero_does_not_hide_an_invalid_target(target: Target) -> None:
    loss = xent.cross_entropy(
        LOGITS, mx.array([0, 7, 1]), sample_weight=mx.zeros((3,)), reduction="none", backend=target.name
    )
    np.testing.assert_array_equal(np.isnan(np.array(loss)), [False, True, False])
