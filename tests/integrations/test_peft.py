"""LoRA with PEFT: a frozen head, an adapter on the head, and a head that is trained with the adapters."""

from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import xent
from tests.integrations.models import batch, device, gradients, make, read, worst_difference
from xent.integrations.peft import head
from xent.integrations.transformers import patch
from xent.integrations.transformers.deferred import is_open

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:Model has .tie_word_embeddings=True.:UserWarning",
    "ignore:.lora_bias=True. was passed",
)

KINDS = {
    "frozen head": {"target_modules": ["q_proj"]},
    "adapter on the head": {"target_modules": ["q_proj", "lm_head"]},
    "adapter with bias": {"target_modules": ["lm_head"], "lora_bias": True, "bias": "lora_only"},
    "DoRA": {"target_modules": ["lm_head"], "use_dora": True},
    "trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 50, 95]}},
    "trained tokens of tied embeddings": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 50, 95]},
}


def adapted(kind: str, name: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    plain = make(name, dtype)
    if "tied" in kind:
        plain.config.tie_word_embeddings = True
        plain.tie_weights()
    model = peft.get_peft_model(plain, peft.LoraConfig(r=4, lora_alpha=8, **KINDS[kind], **settings))
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "lora_B" in key or "tokens_delta" in key:
                value.normal_(std=0.1)
    return model


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_gradients(kind: str, name: str, fused: list[tuple[int, ...]]) -> None:
    model = adapted(kind, name)
    plain, expected = gradients(model, batch())
    warned = (
        r"Tensor\.T looked at them at \S*peft\S+ in get_lora_weight of DoraLinearLayer\. Its head is a "
        r"peft\.tuners\.lora\.layer\.Linear\."
    )
    with patch(model), pytest.warns(RuntimeWarning, match=warned) if kind == "DoRA" else nullcontext():
        patched, found = gradients(model, batch())
    torch.testing.assert_close(patched.loss, plain.loss, rtol=1e-6, atol=0)
    assert worst_difference(found, expected) <= 1e-5
    torch.testing.assert_close(read(patched.logits), plain.logits)
    assert fused == ([] if kind == "DoRA" else [(24, 36 if "adapter" in kind else 32)])


def test_patched_before_the_adapter(fused: list[tuple[int, ...]]) -> None:
    """The loss is fused if the head is not changed. Otherwise it is computed from logits and has the same value."""
    for kind, count in (("frozen head", 1), ("trained head", 2), ("adapter on the head", 2)):
        _, expected = gradients(adapted(kind), batch())
        with patch():
            model = adapted(kind)
        with pytest.warns(RuntimeWarning, match="looked at") if kind == "adapter on the head" else nullcontext():
            _, found = gradients(model, batch())
            torch.optim.SGD(model.parameters()).step()  # the record contains the call of a head that PEFT copied
        assert worst_difference(found, expected) <= 1e-5
        assert len(fused) == count


def test_dropout_in_the_adapter_on_the_head(fused: list[tuple[int, ...]]) -> None:
    model = adapted("adapter on the head", lora_dropout=0.5).train()
    torch.manual_seed(5)
    _, expected = gradients(model, batch())
    with patch(model):
        torch.manual_seed(5)
        outputs, found = gradients(model, batch())
        labels = batch()["labels"][:, 1:].flatten()
        again = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels)
    assert len(fused) == 2
    assert worst_difference(found, expected) <= 1e-5
    torch.testing.assert_close(again, outputs.loss)  # the logits have the same dropout as the loss


def test_disabled_and_merged_adapters() -> None:
    model = adapted("adapter on the head").eval()
    with torch.no_grad(), patch(model):
        with model.disable_adapter():
            off = model(**batch())
            assert is_open(off.logits)
            torch.testing.assert_close(off.loss, make("llama").eval()(**batch()).loss)
        on = model(**batch()).loss
        model.merge_adapter()
        torch.testing.assert_close(model(**batch()).loss, on)
    assert not torch.isclose(on, off.loss)


@pytest.mark.parametrize("safe_merge", [False, True])
def test_merged_before_the_logits_were_read(safe_merge: bool) -> None:
    """PEFT writes to `.data` or replaces it, and the error says so."""
    model = adapted("adapter on the head").eval()
    patch(model)
    for change in (lambda: model.merge_adapter(safe_merge=safe_merge), model.unmerge_adapter):
        logits = model(**batch()).logits
        assert is_open(logits)
        change()
        with pytest.raises(RuntimeError, match=r"never computed.*merging an adapter"):
            logits.sum()


def test_frozen_head_gets_no_gradient_and_no_memory_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = adapted("frozen head"), []
    function = xent.linear_cross_entropy

    def watched(input: Tensor, linear_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        loss = function(input, linear_weight, *args, **kwargs)
        saved = [tensor for tensor in loss.grad_fn.saved_tensors if tensor is not None]
        asked.append((linear_weight.requires_grad, sum(tensor.nbytes for tensor in saved), input.nbytes))
        return loss

    monkeypatch.setattr(xent, "linear_cross_entropy", watched)
    with patch(model):
        gradients(model, batch())
    ((trained, saved, hidden),) = asked
    assert not trained
    assert saved < 2 * hidden  # the hidden states' gradient and a few scalars, not the (V, D) gradient
    assert model.get_output_embeddings().weight.grad is None


@pytest.mark.parametrize("kind", ["adapter on the head", "adapter with bias"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_float32_adapters_on_a_bfloat16_head(kind: str, name: str, fused: list[tuple[int, ...]]) -> None:
    """PEFT's default without autocast: the loss is fused, and as close to float32 as the unfused one."""
    wide, narrow = (adapted(kind, name, dtype) for dtype in (torch.float32, torch.bfloat16))
    wide.load_state_dict(narrow.state_dict())
    truth, exact = gradients(wide, batch())
    plain, rounded = gradients(narrow, batch())
    with patch(narrow):
        patched, found = gradients(narrow, batch())
        assert read(patched.logits).dtype == plain.logits.dtype == torch.bfloat16
    assert len(fused) == 1
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert (patched.loss - truth.loss).abs() <= 1.5 * (plain.loss - truth.loss).abs() + 2.0**-8
    for key, gradient in exact.items():
        ours, theirs = ((values[key] - gradient).norm() for values in (found, rounded))
        assert ours <= 1.5 * theirs + 2.0**-8 * gradient.norm(), key


HEADS = [kind for kind in KINDS if kind != "DoRA"]


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_head_in_a_loop_of_ones_own(kind: str, patched: bool) -> None:
    model = adapted(kind)
    module = model.get_output_embeddings()
    labels, hidden = batch()["labels"], torch.randn(2, 12, 32, device=device, requires_grad=True)
    trained = [hidden, *[each for each in module.parameters() if each.requires_grad]]
    kinds = {name: type(each) for name, each in module.named_modules()}
    expected = nn.functional.cross_entropy(module(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    if patched:
        patch(model)
    input, weight, bias = head(module, hidden)
    loss = xent.linear_cross_entropy(input, weight, labels, linear_bias=bias, shift=1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, trained), torch.autograd.grad(expected, trained), rtol=1e-4, atol=1e-6
    )
    assert "adapter" not in kind or not torch.equal(weight, module.get_base_layer().weight)
    if not patched:
        assert {name: type(each) for name, each in module.named_modules()} == kinds
    with torch.no_grad():
        torch.testing.assert_close(nn.functional.linear(*head(module, hidden[:, -1:])), module(hidden[:, -1:]))


@pytest.mark.filterwarnings("ignore:training this .* takes the memory of its logits:RuntimeWarning")
def test_head_that_is_no_sum_of_products() -> None:
    module = adapted("DoRA").get_output_embeddings()
    words = (
        r"module must compute a sum of products .*peft\.tuners\.lora\.layer\.Linear does not: Tensor\.\w+ looked at "
        r"them at .* of DoraLinearLayer\. Merge the adapter"
    )
    with pytest.raises(TypeError, match=words):
        head(module, torch.randn(4, 32, device=device))
    with pytest.raises(ValueError, match=r"must be, or hold, a torch\.nn\.Linear"):
        head(nn.Identity(), torch.randn(4, 32))
