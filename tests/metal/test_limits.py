"""Kernels whose pipelines allow few threads, and kernels that Apple's compiler rejects."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.metal.emulator.capture import Source
from tests.metal.emulator.kernels import Emulator
from tests.options import OPTIONS
from tests.targets import Target
from xent.command.check.case import Case

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("limit", [500, 384, 96, 32])
@pytest.mark.parametrize("vocabulary", [67, 4096, 20_000])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fewer_threads_if_the_pipeline_has_a_limit(
    target: Target, emulator: Emulator, limit: int, vocabulary: int, reduction: str
) -> None:
    emulator.limit = lambda source: limit
    case = Case("cross_entropy", (3,), vocabulary, "float32", "all", OPTIONS["all"], reduction=reduction, ignored=0.0)
    target.judge(case)


def loss_and_gradient(**options: Any) -> tuple[float, mx.array]:
    logits, classes = mx.array(RNG.normal(size=(3, 50)).astype(np.float32)), mx.array([1, 2, 3])
    loss, grad = mx.value_and_grad(lambda z: xent.cross_entropy(z, classes, **options))(logits)
    expected = xent.cross_entropy(np.array(logits), np.array(classes), **{**options, "backend": "numpy"})
    assert loss.item() == pytest.approx(float(expected), rel=1e-5)
    return float(loss), grad


@pytest.mark.parametrize("limit", [0, 16])
def test_one_failing_kernel_is_replaced_with_a_warning(emulator: Emulator, limit: int) -> None:
    def softcaps(source: Source) -> int:
        return limit if "rows__float_0_1_" in source.name else 1024

    emulator.limit = softcaps
    loss_and_gradient(backend="metal")
    with pytest.warns(RuntimeWarning, match=r"a Metal kernel of xent does not run on this GPU: .* MLX's operations"):
        loss_and_gradient(softcap=3.0, backend="metal")
