"""A patched model without a fused loss warns once, with the reason, and explain(model) repeats it."""

import copy
import functools
import pickle
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.integrations.models import batch, gradients, make
from xent.integrations.transformers import explain, patch, unpatch

TOKENS = batch()["input_ids"]  # made outside of compiled functions: PyTorch 2.8 cannot compile a random generator
SAYS = "training this LlamaForCausalLM takes the memory of its logits, as without xent: "


def step(model: Any) -> None:
    """Make a training step like a caller with its own loss."""
    logits = model(TOKENS).logits
    (-logits.log_softmax(-1)[..., 0].mean()).backward()


def test_fused() -> None:
    model = make("gemma2")
    assert explain(model).startswith("Gemma2ForCausalLM is not patched: its training takes the memory of its logits")
    patch(model)
    assert explain(model).splitlines() == [
        "Gemma2ForCausalLM is patched, and its head defers its logits: lm_head (32 to 96).",
        "Training: none has been seen.",
        "Evaluation: none has been seen.",
    ]
    outputs = model(**batch())
    with torch.no_grad():
        model.eval()(**batch())
    assert explain(model).splitlines()[1:] == [
        "Training: fused. Between head and loss: divided by 0.5, tanh, multiplied by 0.5.",
        "Evaluation: fused. Between head and loss: divided by 0.5, tanh, multiplied by 0.5.",
    ]
    with pytest.warns(RuntimeWarning, match=r"of its logits, as without xent: Tensor\.max looked at them"):
        outputs.logits.max()
    besides = r"0\.5\. The logits were computed besides: Tensor\.max looked at them at \S*test_explain.py:\d+ in"
    assert re.search(besides, explain(model))
    unpatch(model)
    assert "is not patched" in explain(model)


def test_what_was_recorded() -> None:
    for name, words in {
        "phi": "the head's bias added",
        "granite": "divided by 0.125",
        "mamba": "",
    }.items():
        model = make(name)
        with patch(model):
            model(**batch())
            assert f"Training: fused.{f' Between head and loss: {words}.' if words else ''}\n" in explain(model)


def test_logits_that_are_read() -> None:
    """There is one warning, however often they are read, with the caller's line, not PyTorch's."""
    model = make("llama")
    patch(model)
    with pytest.warns(
        RuntimeWarning, match=re.escape(SAYS) + r"Tensor\.log_softmax looked at them at \S+\.py:\d+ in step"
    ):
        step(model)
    step(model)
    gradients(model, batch())
    assert "Training: fused." in explain(model)
    step(model)
    assert re.search(
        r"Training: not fused: Tensor\.log_softmax looked at them at \S+\.py:\d+ in step\.", explain(model)
    )
    with torch.no_grad():
        model(batch()["input_ids"]).logits.sum()
    assert "Evaluation: not fused: Tensor.sum looked at them" in explain(model)
    model(batch()["input_ids"])
    assert "Training: logits were deferred, and no loss of them was taken." in explain(model)


def test_logits_read_outside_of_python() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
            return z.sum()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.expand(2, 12, 96)

    model = make("llama")
    with patch(model), pytest.warns(RuntimeWarning, match=r"looked at them at \S+test_explain.py:\d+ in forward"):
        Sum.apply(model(batch()["input_ids"]).logits).backward()


def test_evaluation_does_not_warn() -> None:
    model = make("llama")
    with patch(model), torch.no_grad():
        model(batch()["input_ids"]).logits.sum()
    with patch(model):
        model.eval()(batch()["input_ids"]).logits.sum()


def test_head_with_a_hook_cannot_defer(fused: list[tuple[int, ...]]) -> None:
    model, message = make("llama"), "the head has a forward hook"
    model.lm_head.register_forward_hook(lambda *args: None)
    with patch(model):
        with pytest.warns(RuntimeWarning, match=re.escape(SAYS) + ".*" + message):
            gradients(model, batch())
        gradients(model, batch())
        assert not fused
        assert f"Training: not fused: {message}" in explain(model)


def replaced_forward(model: Any, **inputs: Any) -> Any:
    hidden = model.model(inputs["input_ids"]).last_hidden_state
    logits = F.linear(hidden, model.lm_head.weight)
    return transformers.modeling_outputs.CausalLMOutputWithPast(loss=logits.logsumexp(-1).mean(), logits=logits)


REPLACE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "head": (
        lambda model: model.resize_token_embeddings(104, mean_resizing=False),
        "its head was replaced after patch",
    ),
    "head by hand": (
        lambda model: setattr(model, "lm_head", nn.Linear(32, 96, bias=False)),
        "its head was replaced after patch",
    ),
    "method of the model": (
        lambda model: setattr(model, "forward", types.MethodType(replaced_forward, model)),
        r"the forward of its LlamaForCausalLM was replaced by \S+test_explain\.replaced_forward",
    ),
    "partial function": (
        lambda model: setattr(model, "forward", functools.partial(replaced_forward, model)),
        r"the forward of its LlamaForCausalLM was replaced by \S+test_explain\.replaced_forward",
    ),
    "forward of the head": (
        lambda model: setattr(model.lm_head, "forward", lambda hidden: F.linear(hidden, model.lm_head.weight)),
        r"the forward of its DeferringLinear was replaced by \S+test_explain\.<lambda>",
    ),
    "a loop of its own": (lambda model: setattr(type(model), "__call__", replaced_forward), "its head was not called"),
}


@pytest.mark.parametrize("kind", REPLACE)
def test_heads_that_are_not_called(kind: str) -> None:
    """The bypassed head is detected when an optimizer steps."""
    model, others = make("llama"), torch.optim.SGD(make("llama").parameters())
    model.__class__ = type("LlamaForCausalLM", (type(model),), {})
    patch(model)
    optimizer = torch.optim.SGD(model.parameters())
    gradients(model, batch())
    optimizer.step()
    replace, message = REPLACE[kind]
    replace(model)
    if kind == "head":
        optimizer = torch.optim.SGD(model.parameters())
        gradients(model, batch())
        optimizer.step()
    gradients(model, batch())
    others.step()
    with pytest.warns(RuntimeWarning, match=re.escape(SAYS) + message):
        optimizer.step()
    optimizer.step()
    if kind in ("head", "head by hand"):
        assert "is not patched any more: its head was replaced after patch(model)" in explain(model)
        patch(model)
        gradients(model, batch())
        assert "Training: fused.\n" in explain(model)
    elif kind != "forward of the head":
        assert re.search("An optimizer stepped without a call of the head: " + message, explain(model))


def test_two_optimizers_of_one_model() -> None:
    """Both optimizers step once per forward pass."""
    model = make("llama")
    patch(model)
    weights = list(model.parameters())
    optimizers = [torch.optim.SGD(weights[:1]), torch.optim.AdamW(weights[1:])]
    for _ in range(3):
        gradients(model, batch())
        for optimizer in optimizers:
            optimizer.step()
    assert "Training: fused.\n" in explain(model)
    assert "stepped" not in explain(model)


@pytest.mark.parametrize("kind", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(kind: Any) -> None:
    model = make("llama")
    patch(model)
    copied = kind(model)
    gradients(copied, batch())
    assert "Training: fused." in explain(copied)
    with pytest.warns(RuntimeWarning, match=re.escape(SAYS)):
        step(copied)


def test_explain_models_that_cannot_be_patched() -> None:
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    text = explain(transformers.BertModel(config))
    assert text.startswith("BertModel is not patched: the head of BertModel cannot be patched")
    with pytest.raises(ValueError, match="got Linear, which has no get_output_embeddings"):
        explain(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
def test_compiled_function_that_reads_logits() -> None:
    torch.compiler.reset()
    model = make("llama", num_hidden_layers=0)
    patch(model)
    words = "this compiled training step takes the memory of its logits, as without xent: what is compiled looks at"
    with pytest.warns(RuntimeWarning, match=words):
        torch.compile(step, fullgraph=False, backend="aot_eager")(model)
    torch.compile(step_between_graphs, backend="aot_eager")(model)
    torch.compiler.reset()


def test_compiled_models_are_explained() -> None:
    torch.compiler.reset()
    model = make("gemma2", num_hidden_layers=0)
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients(compiled, batch())
    with torch.no_grad():
        torch.compile(step_without_gradients, backend="aot_eager")(model.eval())
    words = explain(model)
    assert "Training: compiled, and fused. Between head and loss: divided by 0.5, tanh, multiplied by 0.5." in words
    assert "Evaluation: compiled, and not fused: the model is exported, or compiled without gradients." in words
    with pytest.warns(RuntimeWarning, match="what is compiled looks at them"):
        torch.compile(step, backend="aot_eager")(model.train())
    assert "Training: compiled, and not fused: what is compiled looks at them." in explain(model)
    torch.compiler.reset()


def step_without_gradients(model: Any) -> Any:
    """Return logits."""
    return model(TOKENS).logits


def step_between_graphs(model: Any) -> None:
    """Read logits outside of the graphs, while torch.compile compiles each frame by itself."""
    logits = model(TOKENS).logits
    torch._dynamo.graph_break()
    print(logits.requires_grad)
    logits.log_softmax(-1).sum().backward()
