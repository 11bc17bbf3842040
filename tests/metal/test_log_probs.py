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
from xent.core.spec import DIFFERENTIABLE

DEVICE = torch_machine.DEVICES[0]
N, D, V = 7, 16, 70
RNG = np.random.default_rng(4)
X, W = RNG.normal(size=(N, D)), RNG.normal(size=(V, D)) / 2
Y = np.where(np.arange(N) == 2, -100, RNG.integers(0, V, N))
T = RNG.uniform(0.5, 2, N)
GIVEN = RNG.dirichlet(np.full(V, 0.3), N)
UPSTREAM = {name: RNG.normal(size=N) for name in ("loss", *DIFFERENTIABLE)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUNCTIONS = ("log_probs", "linear_log_probs")


def place(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.from_numpy(np.array(values)).to(DEVICE, dtype)


def sources(function: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    hidden, classifier = place(X, dtype), place(W, dtype)
    return [hidden, classifier] if function == "linear_log_probs" else [(hidden @ classifier.T)]


def call(function: str, given: list[Tensor], **options: Any) -> Any:
    chunks = {"workspace": 3 * V * 4} if function == "linear_log_probs" else {}
    return getattr(xent, function)(*given, place(Y), backend="metal", **chunks, **options)


def gradient_of(names: tuple[str, ...], target: Any, dtype: torch.dtype, **options: Any) -> Tensor:
    """Return the gradient of logits, in place or in a new tensor, for upstream gradients of these results."""
    leaf = (2 * sources("log_probs")[0]).to(dtype).detach().requires_grad_()
    stats = tuple(name for name in names if name != "loss")
    found = xent.cross_entropy(
        leaf * 1, place(target), reduction="none", stats=stats, backend="metal",
        **{name: place(value) if isinstance(value, np.ndarray) else value for name, value in options.items()},
    )  # fmt: skip
    results = {"loss": found[0]} | {name: getattr(found[1], name) for name in stats}
    outputs = [results[name] for name in names]
    return torch.autograd.grad(outputs, leaf, [place(UPSTREAM[name]).to(outputs[0]) for name in names])[0]


CHOSEN = [("lse",), ("nll",), ("entropy",), ("loss", "lse", "nll", "entropy")]


@pytest.mark.parametrize("names", CHOSEN, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_statistics_are_the_same_in_place(names: tuple[str, ...], dtype: torch.dtype) -> None:
    for target in (Y, GIVEN.astype(np.float32)):
        found = gradient_of(names, target, dtype, inplace=True, softcap=3.0)
        assert torch.equal(found, gradient_of(names, target, dtype, softcap=3.0))


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
