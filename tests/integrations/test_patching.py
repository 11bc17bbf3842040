"""patch and unpatch: the models that they change, those that they do not, and their messages."""

import copy
import importlib
import pickle
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import xent
from tests.integrations.models import batch, device, gradients, make, read, worst_difference
from tests.integrations.processes import launch
from xent.integrations.transformers import patch, patching, unpatch
from xent.integrations.transformers.deferred import DeferredLogits, is_open


def defers(model: nn.Module) -> bool:
    return isinstance(model(**batch()).logits, DeferredLogits)


def test_patch_and_unpatch() -> None:
    model = make("llama")
    classes = [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    patch(model)
    patch(model)
    assert defers(model)
    assert list(model.state_dict()) == keys
    assert type(model).__name__ == "LlamaForCausalLM"
    unpatch(model)
    unpatch(model)
    assert not defers(model)
    assert [type(module) for module in model.modules()] == classes


def test_context_manager() -> None:
    model = make("llama")
    with patch(model) as same:
        assert same is model
        assert defers(model)
    assert not defers(model)
    with pytest.raises(ZeroDivisionError), patch(model):
        raise ZeroDivisionError
    assert not defers(model)


def test_nothing_is_left_behind() -> None:
    """Neither by importing nor by patch and unpatch. In a process of its own, where no other model is patched."""
    assert launch(1, "tests.integrations.left_behind") == "nothing\n"


def test_context_manager_on_a_patched_model() -> None:
    """The model stays patched."""
    model = make("llama")
    patch(model)
    with patch(model), patch(model):
        pass
    assert defers(model)
    unpatch(model)
    with patch():
        with patch():
            pass
        assert defers(make("llama"))
    assert not defers(make("llama"))


def test_all_models_created_later() -> None:
    before = make("llama")
    with patch():
        patch()
        assert defers(make("llama"))
        assert defers(make("gemma2"))
        config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
        transformers.BertModel(config)  # it has no head
        kept = make("qwen2")
    assert not defers(before)
    assert not defers(make("llama"))
    assert defers(kept)
    unpatch()
    assert not hasattr(transformers.PreTrainedModel.post_init, "_xent_wraps")


def test_checkpoint_is_not_affected(tmp_path: Path) -> None:
    model = make("gemma2")
    with patch(model):
        model.save_pretrained(tmp_path)
        loss = model(**batch()).loss
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(reloaded.lm_head) is nn.Linear
    torch.testing.assert_close(reloaded.to(model.device)(**batch()).loss, loss, rtol=1e-6, atol=0)
    with patch():
        patched = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert defers(patched.to(model.device))


def test_copies_defer_too() -> None:
    model = make("llama")
    with patch(model):
        assert defers(copy.deepcopy(model))
        assert defers(pickle.loads(pickle.dumps(model)))


def test_head_replaced_by_resizing() -> None:
    """A head that was replaced computes its logits, and patching again finds it."""
    model = make("llama")
    patch(model)
    model.resize_token_embeddings(104, mean_resizing=False)
    _, expected = gradients(model, batch())
    patch(model)
    assert defers(model)
    _, found = gradients(model, batch())
    assert worst_difference(found, expected) <= 1e-5


def test_wrapped_models() -> None:
    model = make("llama")
    with patch(nn.DataParallel(model)):
        assert defers(model)
    with patch(torch.compile(model)):
        assert defers(model)
    assert not defers(model)


@pytest.mark.parametrize("patched_first", [True, False])
def test_model_that_accelerate_dispatches(patched_first: bool, fused: list[tuple[int, ...]]) -> None:
    """As with device_map: every module moves its inputs, and outputs are moved back to the device of the inputs."""
    accelerate = pytest.importorskip("accelerate")
    model, places = make("llama"), {"model": str(device), "lm_head": str(device)}
    plain, expected = gradients(model, batch())
    if patched_first:
        patch(model)
    accelerate.dispatch_model(model, places, main_device=str(device), force_hooks=True)
    patch(model)
    outputs, found = gradients(model, batch())
    assert fused
    assert is_open(outputs.logits)
    assert worst_difference(found, expected) <= 1e-5
    assert torch.equal(read(outputs.logits), plain.logits)
    unpatch(model)
    assert not defers(model)


def test_masked_language_model(fused: list[tuple[int, ...]]) -> None:
    """Any model with a linear head that calls F.cross_entropy is supported, causal or not."""
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=96,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).to(batch()["labels"].device)
    _, expected = gradients(model, batch())
    with patch(model):
        _, found = gradients(model, batch())
    assert fused
    assert worst_difference(found, expected) <= 1e-5


class Tagged(nn.Linear):
    """A linear head with its own class, which pickles itself in its own way."""

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "pickled": True}


def test_head_of_a_subclass_pickles_and_copies() -> None:
    model = make("llama")
    model.lm_head.__class__ = Tagged
    patch(model)
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert defers(copied)
        assert type(copied.lm_head) is type(model.lm_head)
        assert isinstance(copied.lm_head, Tagged)
        assert copied.lm_head.pickled
        torch.testing.assert_close(copied(**batch()).loss, model(**batch()).loss)
        unpatch(copied)
        assert type(copied.lm_head) is Tagged
    unpatch(model)
    assert type(pickle.loads(pickle.dumps(model)).lm_head) is Tagged


_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_TEXT = {**_VISION, "vocab_size": 16, "pad_token_id": 0}

UNFIT = {
    "ViTForImageClassification": (
        {**_VISION, "image_size": 8, "patch_size": 4},
        r"xent\.cross_entropy\(outputs\.logits, l",
    ),
    "SegformerForSemanticSegmentation": ({}, r"xent\.cross_entropy\(logits, labels, axis=1\)"),
    "BertForTokenClassification": (_TEXT, r"xent\.cross_entropy\(outputs\.logits, labels\), which shifts nothing"),
    "LlamaForSequenceClassification": (_TEXT, r"xent\.cross_entropy\(outputs\.logits, labels\), which shifts nothing"),
    "BertForQuestionAnswering": (_TEXT, r"xent\.cross_entropy\(outputs\.start_logits, start_positions\)"),
    "LlamaModel": (_TEXT, r"no language-model head: load the class that has one \(transformers\.AutoModelForCausalLM"),
    "FSMTForConditionalGeneration": (
        {
            "src_vocab_size": 16,
            "tgt_vocab_size": 16,
            "d_model": 16,
            "langs": ["en", "de"],
            "max_position_embeddings": 16,
        }
        | {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")},
        r"xent\.cross_entropy\(outputs\.logits, labels\), which shifts nothing",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_advice_for_models_without_a_causal_head(name: str) -> None:
    """The recommended call fits the model. causal_lm_loss would shift the labels."""
    settings, message = UNFIT[name]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**settings))
    with pytest.raises(ValueError, match=f"the head of {name} cannot be patched: .*" + message) as caught:
        patch(model)
    assert "causal_lm_loss" not in str(caught.value)


def test_advice_computes_the_loss_of_the_model() -> None:
    for name, settings in (
        ("BertForTokenClassification", {**_TEXT, "num_labels": 4}),
        ("ViTForImageClassification", {**_VISION, "image_size": 8, "patch_size": 4, "num_labels": 4}),
    ):
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**settings)).eval()
        images = name.startswith("ViT")
        labels = torch.tensor([1, 3]) if images else torch.tensor([[1, 2, -100], [0, 3, 1]])
        inputs = torch.randn(2, 3, 8, 8) if images else torch.tensor([[1, 2, 3], [4, 5, 6]])
        outputs = model(inputs, labels=labels)
        torch.testing.assert_close(xent.cross_entropy(outputs.logits, labels), outputs.loss)


class _Halved(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / 2


@pytest.mark.parametrize("kind", ["other forward", "forward of its own"])
def test_head_that_cannot_be_deferred(kind: str) -> None:
    model = make("llama")
    if kind == "forward of its own":
        message = r"LlamaForCausalLM cannot be patched: .* is Linear, and it must be"
        forward = model.lm_head.forward
        model.lm_head.forward = lambda hidden: forward(hidden) / 2
    else:
        message = r"is _Halved, .* With model\.loss_function = xent\.integrations\.transformers\.causal_lm_loss"
        model.lm_head.__class__ = _Halved
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        patch(model)
    with pytest.raises(ValueError, match="cannot be patched"):
        unpatch(model)
    assert [type(module) for module in model.modules()] == classes


def test_not_a_model_of_transformers() -> None:
    with pytest.raises(ValueError, match=r"got Sequential, which has no get_output_embeddings"):
        patch(nn.Sequential(nn.Linear(2, 2)))


def test_old_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["transformers"]  # the module replaces itself during its import
    monkeypatch.setattr(module, "__version__", "4.57.1")
    with pytest.raises(ImportError, match=r"needs transformers 5, found 4\.57\.1: pip install"):
        importlib.reload(patching)


def test_class_derived_from_the_patched_class() -> None:
    """FSDP2 replaces a module's class by a subclass of it."""
    model = make("llama")
    patch(model)
    model.lm_head.__class__ = type("Theirs", (type(model.lm_head),), {})
    unpatch(model)
    assert not defers(model)
    patch(model)
    assert defers(model)
    model = make("llama")
    model.lm_head.__class__ = type("Before", (nn.Linear,), {})
    patch(model)
    assert defers(model)
    unpatch(model)
    assert type(model.lm_head).__name__ == "Before"
