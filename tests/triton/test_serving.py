"""Calls that Triton cannot serve: an error if it was named; with "auto" on a GPU, backend "torch" and a warning."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target, backend_of
from xent.backends.torch import planned
from xent.backends.torch.contract import STEPS
from xent.backends.triton import machine

dispatch = sys.modules[xent.backends.__module__]
"""The module that selects a backend."""

BACKEND = backend_of("triton")
FLOAT64 = "its kernels accumulate in float32 and would round float64, which backend 'torch' serves"


@pytest.fixture
def native(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the target's device the one that Triton is native to, as only CUDA is, with no warning given yet."""
    monkeypatch.setattr(BACKEND, "native_to", (target.device,))
    monkeypatch.setattr(dispatch, "_warned", set())
    planned.clear()  # a later call keeps its backend, without a warning


def losses(target: Target, dtype: torch.dtype) -> list[Callable[..., Tensor]]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(7, 7, dtype=dtype, device=target.device) for _ in range(2))
    classes = torch.arange(7, device=target.device)
    return [
        lambda **options: xent.cross_entropy(hidden, classes, **options),
        lambda **options: xent.linear_cross_entropy(hidden, weight, classes, **options),
    ]


def test_float64_is_refused_by_name(target: Target) -> None:
    for loss in losses(target, torch.float64):
        with pytest.raises(xent.BackendError, match=f"backend 'triton' cannot serve this call: {FLOAT64}"):
            loss(backend="triton")


@pytest.mark.usefixtures("native")
def test_float64_goes_to_torch_with_one_warning(target: Target) -> None:
    first, second = losses(target, torch.float64)
    with pytest.warns(RuntimeWarning, match=f"does not use its triton backend, .*{FLOAT64}") as caught:
        served = first()
    assert len(caught) == 1
    assert torch.equal(served, first(backend="torch"))
    assert torch.equal(second(), second(backend="torch"))


def test_float64_goes_to_torch_without_warning_if_triton_is_not_native() -> None:
    logits, classes = torch.randn(3, 5, dtype=torch.float64), torch.arange(3)
    assert torch.equal(xent.cross_entropy(logits, classes), xent.cross_entropy(logits, classes, backend="torch"))


def test_auto_takes_triton(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    BACKEND.load()
    start = STEPS["triton"]
    monkeypatch.setitem(STEPS, "triton", lambda setting: [served.append("triton"), start(setting)][1])
    for loss in losses(target, torch.float32):
        assert loss().isfinite()
    assert served == ["triton"] * 2


def test_other_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DEVICES", ("cuda",))
    planned.clear()
    logits, classes = torch.zeros(3, 5), torch.arange(3)
    message = "it serves cuda tensors and got a cpu tensor, which backend 'torch' serves"
    with pytest.raises(xent.BackendError, match=message):
        xent.cross_entropy(logits, classes, backend="triton")
    assert torch.equal(xent.cross_entropy(logits, classes), xent.cross_entropy(logits, classes, backend="torch"))
