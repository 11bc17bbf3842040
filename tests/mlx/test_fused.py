"""What a GPU runs, with its fused operations played by their definition on the CPU: the matrix in one file."""

import mlx.core as mx
import pytest

from tests.cases import FUNCTIONS, all_cases
from tests.targets import Target
from xent.backends.mlx import fused, plain, weight_gradient
from xent.core.check.cases import Case
from xent.core.check.judge import judge_case

CASES = [
    case
    for function in FUNCTIONS
    for dtype in ("float32", "bfloat16", "float16")
    for case in all_cases(function, dtype)
]


def cross_entropy(logits: mx.array, target: mx.array) -> mx.array:
    """Return what mx.fast.cross_entropy returns on a GPU, where it accumulates in float32."""
    x = logits.astype(mx.float32)
    peak = mx.stop_gradient(x.max(-1, keepdims=True))
    return (mx.logsumexp(x - peak, axis=-1) + (peak - mx.take_along_axis(x, target[:, None], -1))[:, 0]).astype(
        mx.float32
    )


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "cross_entropy", cross_entropy, raising=False)  # MLX before 0.32.4 has none
    for module in (fused, plain, weight_gradient):
        monkeypatch.setattr(module, "device_type", lambda: "gpu")
    monkeypatch.setattr(weight_gradient, "_SLICE_BYTES", 2048)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(target: Target, case: Case) -> None:
    if target.name != "mlx":
        return
    for comparison in judge_case(target.backend, target.harness, case):
        assert comparison.passed, comparison


@pytest.mark.parametrize("workspace", [67 * 2 * 3, 67 * 2 * 20])
def test_sum_over_chunks(target: Target, workspace: int) -> None:
    for case in CASES:
        if case.name in ("plain", "all") and case.function == "linear_cross_entropy" and case.reduction != "sum":
            for comparison in judge_case(target.backend, target.harness, case, workspace=workspace):
                assert comparison.passed, comparison
