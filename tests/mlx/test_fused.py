"""The path for GPUs. On a CPU, MLX's fused operations for 16-bit floats are simulated by their definition.

Sums over classes and exponentials are those for CPUs, where MLX's own sum adds one class after the other, and GPUs add
in a tree. On a GPU nothing is simulated.
"""

import math
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.cases import FUNCTIONS, LOG_PROBS, all_cases, log_prob_cases, paired_cases
from tests.covering import crossed
from tests.options import LOG_PROB_OPTIONS
from tests.targets import Target
from tests.test_log_probs import test_same_bits_with_and_without_gradients_and_statistics  # noqa: F401
from tests.test_numbers import test_float16_gradients_of_a_frequent_class_do_not_overflow  # noqa: F401
from tests.test_stats import compare_rows
from xent.backends.mlx import autograd, block, devices, plain, sources
from xent.command.check.case import Case
from xent.command.check.judge import judge_case

DTYPES = ("float32", "bfloat16", "float16")
CASES = [case for function in FUNCTIONS for dtype in DTYPES for case in all_cases(function, dtype)]
ROWS = [case for name in LOG_PROBS for case in log_prob_cases(name) if case.dtype in DTYPES]
PAIRS = [case for name in (*FUNCTIONS, *LOG_PROBS) for dtype in DTYPES for case in paired_cases(name, (dtype,))]


@mx.custom_function
def cross_entropy(logits: mx.array, target: mx.array) -> mx.array:
    """Return what mx.fast.cross_entropy returns on a GPU, where it accumulates in float32."""
    x = logits.astype(mx.float32)
    peak = x.max(-1)
    return mx.log(mx.exp(x - peak[:, None]).sum(-1)) + (peak - at(x, target)[:, 0])


@cross_entropy.vjp
def cross_entropy_vjp(
    primals: tuple[mx.array, mx.array], upstream: mx.array, loss: mx.array
) -> tuple[mx.array, mx.array]:
    """Return its gradient from loss and target's logit, as the GPU does: NaN where that logit is -inf."""
    logits, target = primals
    x = logits.astype(mx.float32)
    p = mx.power(math.e, (x - at(x, target)) - loss[:, None])  # closer than mx.exp on the CPU
    hot = mx.arange(x.shape[-1]) == target[:, None]
    return (upstream[:, None] * (p - hot)).astype(logits.dtype), mx.zeros_like(target)


def at(x: mx.array, target: mx.array) -> mx.array:
    """Return the target's x (R, 1)."""
    return mx.take_along_axis(x, target[:, None], -1)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if devices.device_type() == "gpu":
        return
    monkeypatch.setattr(mx.fast, "cross_entropy", cross_entropy, raising=False)  # MLX before 0.32.2 has none
    monkeypatch.setattr(block, "has_fused_loss", lambda: True)
    for module in (autograd, block, plain):
        monkeypatch.setattr(module, "device_type", lambda: "gpu")
    monkeypatch.setattr(sources, "chunk_device", lambda: "mlx-cuda")
    monkeypatch.setattr(sources, "_SLICE_BYTES", 2048)


@pytest.mark.parametrize("case", CASES + ROWS + PAIRS, ids=str)
def test_loss_and_gradients(target: Target, case: Case) -> None:
    if target.name != "mlx":
        return
    target.judge(case)


@pytest.mark.parametrize("seed", range(12))
def test_rows_with_probable_targets(target: Target, seed: int) -> None:
    """Some of 2100 rows with 9 classes have p_y near 1, where 1 - p_y must not be rounded to 0."""
    for case in CASES:
        if case.name == "more rows than one block" and case.dtype == "float32":
            for comparison in judge_case(target.backend, target.harness, case, seed):
                assert comparison.passed or comparison.output == "linear_weight", comparison


def test_entropy_counts_the_target(target: Target) -> None:
    """The fused p in float32 excludes the target, whether it is the most probable class or not."""
    logits, classes = np.array([[2.0, 1.0, -1.0], [0.0, 3.0, 2.0], [5.0, -4.0, 5.0]]), np.array([0, 2, 1])
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    options = {"stats": ("entropy",), "backend": target.name}
    _, stats = xent.cross_entropy(mx.array(logits, mx.float32), mx.array(classes), **options)
    np.testing.assert_allclose(np.array(stats.entropy), -(p * np.log(p)).sum(-1), rtol=1e-6)


@pytest.mark.parametrize("workspace", [67 * 2 * 3, 67 * 2 * 20])
@pytest.mark.parametrize("device", ["metal", "mlx-cuda"])
def test_sum_over_chunks(target: Target, workspace: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "chunk_device", lambda: device)
    for case in CASES:
        if case.name in ("plain", "all") and case.function == "linear_cross_entropy" and case.reduction != "sum":
            target.judge(case, workspace=workspace)


def test_float32_does_not_use_inexact_exponentials(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the fused loss and of softmax fail the matrix on NVIDIA GPUs."""
    monkeypatch.setattr(mx.fast, "cross_entropy", None, raising=False)
    monkeypatch.setattr(mx, "softmax", None)
    loss = partial(xent.cross_entropy, target=mx.array([0, 2]), label_smoothing=0.1, backend=target.name)
    assert mx.isfinite(mx.grad(loss)(mx.zeros((2, 3)))).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_first_class_with_a_bias_of_minus_infinity(target: Target, reduction: str) -> None:
    """Kernels use that class as the target of ignored rows. It must not affect the classifier's gradient."""
    dtype = mx.bfloat16
    x, w, y = mx.ones((4, 8), dtype), mx.ones((5, 8), dtype), mx.array([1, -100, 2, -100])
    b = mx.array([-mx.inf, 0.0, 1.0, 0.0, 0.0], dtype)

    def loss(x: mx.array, w: mx.array, b: mx.array) -> mx.array:
        return xent.linear_cross_entropy(x, w, y, linear_bias=b, reduction=reduction, backend=target.name).sum()

    for grad in mx.grad(loss, argnums=(0, 1, 2))(x, w, b):
        assert mx.isfinite(grad).all()
        assert grad.any()


@pytest.mark.parametrize(
    ("version", "chunks", "expected"),
    [
        ("0.32.3", "metal", False),
        ("0.32.4", "metal", True),
        ("0.33.0.dev1", "metal", True),
        ("0.32.2", "mlx-cuda", True),
    ],
)
def test_fused_loss_is_used_if_it_is_one_kernel(
    monkeypatch: pytest.MonkeyPatch, version: str, chunks: str, expected: bool
) -> None:
    """On Metal, MLX 0.32.2 and 0.32.3 compose it of operations that round to the logits' dtype."""
    monkeypatch.setattr(devices, "version", lambda: version)
    monkeypatch.setattr(devices, "device_type", lambda: "gpu")
    monkeypatch.setattr(mx.metal, "is_available", lambda: chunks == "metal")
    assert devices.has_fused_loss() == expected


@pytest.mark.parametrize(*crossed(function=LOG_PROBS, options=LOG_PROB_OPTIONS, dtype=DTYPES))
def test_statistics_of_log_probabilities(target: Target, function: str, options: str, dtype: str) -> None:
    workspace = 67 * 4 * 5 if function == "linear_log_probs" else None
    case = Case(function, (4, 5), 67, dtype, "", LOG_PROB_OPTIONS[options], "none", entropy=True, workspace=workspace)
    compare_rows(case, target, close=1e-5)
