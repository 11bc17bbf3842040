"""patch(model, precision="fp8"): the loss of training steps has products in 8 bits, that of evaluation has not."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import xent
from tests.integrations.fp8_sharded import WAYS
from tests.integrations.models import batch, device, make
from tests.integrations.processes import launch
from tests.integrations.training import run
from xent.integrations.transformers import patch, unpatch


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name backend "torch", which emulates the products, where there is no GPU that has them."""
    if device == "cpu" or torch.cuda.get_device_capability() < (8, 9):
        monkeypatch.setenv("XENT_BACKEND", "torch")


@pytest.fixture
def precisions(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Return a list to which calls append their precision."""
    found = []
    loss = xent.linear_cross_entropy

    def watched(*args: Any, **options: Any) -> Any:
        found.append(options.get("precision"))
        return loss(*args, **options)

    monkeypatch.setattr(xent, "linear_cross_entropy", watched)
    return found


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2", "phi"])
def test_training_steps(name: str, precisions: list[str | None]) -> None:
    model, inputs = make(name).bfloat16(), batch()
    patch(model)
    plain = model(**inputs).loss
    plain.backward()
    expected = {key: weight.grad.float() for key, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    patch(model, precision="fp8")
    loss = model(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss, plain, rtol=1e-2, atol=0)
    for key, weight in model.named_parameters():
        assert (weight.grad.float() - expected[key]).norm() < 0.1 * expected[key].norm(), key
    with torch.no_grad():
        model(**inputs).loss  # noqa: B018
    assert precisions == [None, "fp8", None]


def test_trainer(tmp_path: Path, precisions: list[str | None]) -> None:
    _, expected = run(tmp_path, False, bf16=True)
    model = make("llama")
    patch(model, precision="fp8")
    _, losses = run(tmp_path, False, model=model, bf16=True)
    assert losses == pytest.approx(expected, rel=2.0**-5)
    assert precisions[:3] == ["fp8"] * 3
    assert set(precisions[3:]) == {None}


def test_ddp_and_fsdp2() -> None:
    printed = launch(2, "tests.integrations.fp8_sharded").splitlines()
    assert [line for line in printed if not line.startswith("[Gloo]")] == list(WAYS)


def test_models_created_later(precisions: list[str | None]) -> None:
    with patch(precision="fp8"):
        model = make("llama").bfloat16()
    model(**batch()).loss.backward()
    assert precisions == ["fp8"]
    unpatch(model)


def test_refusals() -> None:
    model: transformers.PreTrainedModel = make("llama")
    with pytest.raises(ValueError, match="precision must be None or 'fp8'"):
        patch(model, precision="int8")
    patch(model, precision="fp8")
    with pytest.raises(TypeError, match=r"needs matrix products in torch\.bfloat16"):
        model(**batch())
