"""Tiny models of transformers, created from configurations, without downloads."""

import copy
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from xent.integrations.transformers import patch
from xent.integrations.transformers.history import History
from xent.integrations.transformers.patching import defer_logits

__all__ = [
    *("LISTED", "MODELS", "SMALL", "TOKENS", "VOCABULARY", "batch", "compare_under_autocast"),
    *("deferring", "device", "gradients", "make", "read", "spread_logits", "worst_difference"),
]

VOCABULARY = 96
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **TOKENS,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL),
    "llama-tied": ("LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", SMALL),
    "qwen3": ("Qwen3Config", {**SMALL, "head_dim": 8}),
    "mistral": ("MistralConfig", SMALL),
    "gemma2": ("Gemma2Config", {**SMALL, "head_dim": 8, "final_logit_softcapping": 0.5}),
    "gemma3": ("Gemma3TextConfig", {**SMALL, "head_dim": 8, "final_logit_softcapping": 0.5}),
    "phi3": ("Phi3Config", SMALL),
    "granite": ("GraniteConfig", {**SMALL, "logits_scaling": 0.125}),
    "cohere": ("CohereConfig", {**SMALL, "logit_scale": 4.0}),
    "gpt2": ("GPT2Config", {"vocab_size": VOCABULARY, **_GPT2, **_NO_DROPOUT, **TOKENS}),
    "mixtral": ("MixtralConfig", {**SMALL, "num_local_experts": 4, "output_router_logits": True}),
    "phi": ("PhiConfig", SMALL),  # a head with bias
    "mamba": (  # .float() after the head
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, **TOKENS},
    ),
}
"""Name -> configuration class and its arguments. Softcaps and scales are strong, so that a missing one is noticed."""

LISTED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "granite", "cohere", "gpt2", "mixtral")
"""The models that the documentation names. test_coverage.py has the others."""

device = "cuda" if torch.cuda.is_available() else "cpu"


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model with weights large enough for different logits, the same at each call.

    With `num_hidden_layers=0` it is quickly compiled: it has its embedding, norm and head, and what follows the head.
    """
    kind, arguments = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**copy.deepcopy(arguments | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    spread_logits(model)
    return model


def spread_logits(model: Any) -> None:
    """Give a head weights that are large enough for different logits."""
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.normal_(std=0.3)
        if head.bias is not None:
            head.bias.normal_()


def deferring(head: nn.Linear) -> nn.Linear:
    """Make a head defer its logits without a model."""
    history = History("Model")
    history._warned = True  # reading the logits needs no warning here
    defer_logits(head, history)
    return head


def batch(masked: bool = True, rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Return tokens and labels; with some of the labels masked."""
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1)).to(device)
    labels = tokens.clone()
    if masked:
        labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def gradients(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return the model's outputs and the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    outputs = model(**inputs)
    (outputs["loss"] if isinstance(outputs, dict) else outputs[0]).backward()
    return outputs, {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def read(logits: Tensor) -> Tensor:
    """Return the values of the logits of a training step, which emits a warning because it stores them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(training this|this compiled)", RuntimeWarning)
        return logits.detach()


def compare_under_autocast(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype) -> None:
    """Assert that a patched model has the logits of the plain one, and gradients as close to those in float32."""
    _, truth = gradients(model, inputs)
    with torch.autocast(device, torch.bfloat16):
        plain, rounded = gradients(model, inputs)
        with patch(model):
            patched, found = gradients(model, inputs)
    assert patched.logits.dtype == plain.logits.dtype == dtype
    assert torch.equal(read(patched.logits), plain.logits)  # read outside of autocast
    for key, gradient in truth.items():
        ours, theirs = ((values[key] - gradient).norm() for values in (found, rounded))
        assert ours <= 1.5 * theirs + 2.0**-8 * gradient.norm(), key


def worst_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of any parameter's gradient, relative to the largest element of that gradient.

    A gradient that is smaller than the rounding error of the model's largest gradient is compared relative to the
    largest. (The gradient of a key's bias, for example, is 0 up to rounding.)
    """
    assert ours.keys() == theirs.keys()
    largest = max(gradient.abs().max().item() for gradient in theirs.values())
    differences = []
    for name, gradient in theirs.items():
        size = gradient.abs().max().item()
        difference = (ours[name] - gradient).abs().max().item()
        differences.append(difference / (size if size > torch.finfo(torch.float32).eps * largest else largest))
    return max(differences)
