"""Log-probabilities with the Metal kernels, on arrays of both frameworks, beyond the matrix.

For MLX arrays the tests of backend "mlx" run too, except those that need `mx.compile`, which cannot trace the emulator.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import xent
from tests.mlx.test_log_probs import (  # noqa: F401
    test_invalid_offsets_give_nan_in_every_row,
    test_logits_are_never_rounded_to_16_bits,
)
from tests.mlx.test_quantized import test_results_of_rows_are_those_of_the_unpacked_weight  # noqa: F401
from xent.backends.metal import torch_machine

DEVICE = torch_machine.DEVICES[0]
N, D, V = 7, 16, 70
RNG = np.random.default_rng(4)
X, W = RNG.normal(size=(N, D)), RNG.normal(size=(V, D)) / 2
Y = np.where(np.arange(N) == 2, -100, RNG.integers(0, V, N))
T = RNG.uniform(0.5, 2, N)
FUNCTIONS = ("log_probs", "linear_log_probs")


def place(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.from_numpy(np.array(values)).to(DEVICE, dtype)


def sources(function: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    hidden, classifier = place(X, dtype), place(W, dtype)
    return [hidden, classifier] if function == "linear_log_probs" else [(hidden @ classifier.T)]


def call(function: str, given: list[Tensor], **options: Any) -> Any:
    chunks = {"workspace": 3 * V * 4} if function == "linear_log_probs" else {}
    return getattr(xent, function)(*given, place(Y), backend="metal", **chunks, **options)


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_temperature_of_tensors_that_is_not_positive(
    function: str, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If values are not checked, as on a GPU, the results of such a row are NaN. Ignored rows are not affected."""
    given, values = sources(function), T.copy()
    values[[1, 2, 5]] = wrong
    with pytest.raises(ValueError, match="temperature must be > 0 in every row"):
        call(function, given, temperature=place(values))
    monkeypatch.setattr("xent.backends.torch.portable.rows.looks_at_targets", lambda device: False)
    monkeypatch.setattr("xent.backends.torch.prepare.check_rows", lambda *_: None)
    leaves = [one.detach().requires_grad_() for one in given]
    found, entropy = call(function, leaves, temperature=place(values), entropy=True)
    wanted = np.isin(np.arange(N), [1, 5])
    for one in (found, entropy):
        np.testing.assert_array_equal(one.detach().isnan().cpu(), wanted)
    torch.testing.assert_close(found, call(function, given, temperature=place(values, torch.float32)), equal_nan=True)
    (gradient, *_) = torch.autograd.grad([found.sum(), entropy.sum()], leaves)
    np.testing.assert_array_equal(gradient.isnan().all(1).cpu(), wanted)
    assert not gradient[2].any()
