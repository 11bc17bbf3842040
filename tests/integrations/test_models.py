"""For every model, the loss, all gradients and the logits of the patched model equal those of the plain model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.models import LISTED, batch, compare_under_autocast, gradients, make, read, worst_difference
from xent.integrations.transformers import causal_lm_loss, patch, unpatch
from xent.integrations.transformers.deferred import DeferredLogits, is_open

MOST = 1e-5
"""The largest allowed relative difference of any parameter's gradient in float32."""


def agree(name: str, inputs: dict[str, Any], fused: list[tuple[int, ...]], **changes: Any) -> None:
    """Compare a step of the patched model, whose loss must be fused, with one of the plain model."""
    model = make(name)
    for attribute, value in changes.items():
        setattr(model, attribute, value)
    plain, expected = gradients(model, inputs)
    with patch(model):
        patched, found = gradients(model, inputs)
        assert len(fused) == 1
        ours, theirs = ((out["loss"], out["logits"]) if isinstance(out, dict) else out[:2] for out in (patched, plain))
        assert isinstance(ours[1], DeferredLogits)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0)
        assert worst_difference(found, expected) <= MOST
        assert torch.equal(read(ours[1]), theirs[1])


SHIFTED = batch()["input_ids"].roll(-1, 1)
SHIFTED[:, -1] = -100
ARGUMENTS: dict[str, dict[str, Any]] = {
    "masked": batch(),
    "whole": batch(masked=False),
    "count": {**batch(), "num_items_in_batch": 37},
    "count in a tensor": {**batch(), "num_items_in_batch": torch.tensor(37)},
    "shifted labels": {**batch(), "shift_labels": SHIFTED},
    "ignored index": {**batch(masked=False), "ignore_index": 7},
    "tuple": {**batch(), "return_dict": False},
    "last logits": {**batch(), "labels": batch()["labels"][:, -6:], "logits_to_keep": 6},
}


EVERY = "masked", "whole", "count"
STEPS = [(name, key) for name in LISTED for key in (ARGUMENTS if name in ("llama", "gemma2") else EVERY)]


@pytest.mark.parametrize(("name", "arguments"), [("llama-tied", "masked"), *STEPS])
def test_step(name: str, arguments: str, fused: list[tuple[int, ...]]) -> None:
    agree(name, ARGUMENTS[arguments], fused)
    assert fused == [(12 if arguments == "last logits" else 24, 32)]


@pytest.mark.parametrize("name", LISTED)
def test_bfloat16(name: str, fused: list[tuple[int, ...]]) -> None:
    """In bfloat16 the patched model is as close to float32 as the plain model is."""
    model = make(name, torch.bfloat16)
    plain, rounded = gradients(model, batch())
    with patch(model):
        patched, found = gradients(model, batch())
    assert fused
    exact, truth = gradients(model.float(), batch())
    unit = 2.0**-8
    assert abs(patched.loss - exact.loss) <= 1.5 * abs(plain.loss - exact.loss) + unit * exact.loss
    assert found.keys() == truth.keys()
    for key, gradient in truth.items():
        ours, theirs = ((values[key].float() - gradient).norm() for values in (found, rounded))
        assert ours <= 1.5 * theirs + unit * gradient.norm(), key


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_autocast(name: str, fused: list[tuple[int, ...]]) -> None:
    compare_under_autocast(make(name), batch(), torch.bfloat16)
    assert fused


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", LISTED)
def test_evaluation(name: str, mode: Any, fused: list[tuple[int, ...]]) -> None:
    model = make(name).eval()
    with mode():
        plain = model(**batch())
        with patch(model):
            patched = model(**batch())
            assert fused
            assert is_open(patched.logits)
            torch.testing.assert_close(patched.loss, plain.loss, rtol=1e-6, atol=0)
            assert torch.equal(patched.logits.argmax(-1), plain.logits.argmax(-1))


@pytest.mark.parametrize("name", LISTED)
def test_generation(name: str) -> None:
    model, tokens = make(name).eval(), batch()["input_ids"][:, :5]
    model.config.output_router_logits = False  # transformers 5.0 cannot generate with it
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(tokens, **settings)
    with patch(model):
        patched = model.generate(tokens, **settings)
        beams = model.generate(tokens, max_new_tokens=4, num_beams=2)
    assert torch.equal(patched.sequences, plain.sequences)
    for ours, theirs in zip(patched.logits, plain.logits, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(beams, model.generate(tokens, max_new_tokens=4, num_beams=2))


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("count", [None, 37, torch.tensor(37)], ids=["none", "int", "tensor"])
def test_causal_lm_loss(name: str, count: Any, fused: list[tuple[int, ...]]) -> None:
    inputs = batch() if count is None else {**batch(), "num_items_in_batch": count}
    model = make(name)
    plain, expected = gradients(model, inputs)
    model.loss_function = causal_lm_loss
    found, gradient = gradients(model, inputs)
    assert not fused
    assert type(found.logits) is Tensor
    torch.testing.assert_close(found.loss, plain.loss, rtol=1e-6, atol=0)
    assert worst_difference(gradient, expected) <= MOST
    agree(name, inputs, fused, loss_function=causal_lm_loss)


def test_causal_lm_loss_moves_a_count_from_another_accelerator() -> None:
    """With a `device_map` over several GPUs the Trainer's count of tokens may be on another one than the logits."""
    moved_to = []

    class OnAnotherGPU(Tensor):
        is_cpu = False

        def to(self, device: Any) -> Tensor:  # type: ignore[override]
            moved_to.append(device)
            return torch.tensor(37)

    logits, labels = torch.randn(2, 5, 96), torch.randint(96, (2, 5))
    found = causal_lm_loss(logits, labels, 96, num_items_in_batch=torch.tensor(0).as_subclass(OnAnotherGPU))
    assert moved_to == [logits.device]
    assert found == causal_lm_loss(logits, labels, 96, num_items_in_batch=37)


def test_wrong_labels() -> None:
    model, inputs = make("llama"), batch()
    inputs["labels"] = inputs["labels"][:, :-2]
    with patch(model), pytest.raises(ValueError, match=r"each of the 24 rows of logits, got shape \(20,\)"):
        model(**inputs)
    unpatch(model)
    with pytest.raises(ValueError, match="24 positions"):
        causal_lm_loss(torch.zeros(2, 12, 96), inputs["labels"], 96)
    with pytest.raises(ValueError, match="got neither"):
        causal_lm_loss(torch.zeros(2, 12, 96), None, 96)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_causal_lm_loss_of_labels_of_any_integer_dtype(dtype: torch.dtype) -> None:
    """The label that is added at the end is -100, which not every dtype has."""
    logits, labels = torch.randn(2, 5, 200), torch.randint(100, (2, 5))
    found = causal_lm_loss(logits, labels.to(dtype), 200)
    assert found == causal_lm_loss(logits, labels, 200)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:]))
