"""float64 results have double precision, although MLX's own float64 exponentials do not."""

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.cases import FUNCTIONS, LOG_PROBS
from tests.options import option_cases
from tests.targets import Target
from xent.command.check.case import Case
from xent.command.check.judge import results_of_case

CASES = [case for function in (*FUNCTIONS, *LOG_PROBS) for case in option_cases(function, "float64")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients_are_double(target: Target, case: Case) -> None:
    if not target.takes("float64"):
        return
    truth, made, *_ = results_of_case(target.backend, target.harness, case)
    for name, expected in truth.items():
        size = np.abs(expected[np.isfinite(expected)]).max(initial=0)
        np.testing.assert_allclose(made[name], expected, rtol=1e-11, atol=1e-13 * size, err_msg=name)


def test_float64_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from xent.backends.mlx import devices

    monkeypatch.setattr(devices, "device_type", lambda: "gpu")
    with mx.stream(mx.cpu):
        logits = mx.zeros((2, 3), mx.float64)
    with pytest.raises(xent.BackendError, match="MLX computes float64 on the CPU alone"):
        xent.cross_entropy(logits, mx.array([0, 1]), backend="mlx")
