"""The measured models: shapes of published models with random weights, without downloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

__all__ = ["SHAPES", "Shape", "make_model"]


@dataclass(frozen=True)
class Shape:
    """A configuration class of transformers with its fields, and how it is measured unless the options say otherwise.

    A loop has `steps` steps, and each variant has `rounds` loops. The longest sequence is that of `limit` GiB.
    """

    config: str
    fields: Mapping[str, Any]
    tokens: int = 8192
    limit: float = 24.0
    steps: int = 1
    rounds: int = 3


_MOST_POSITIONS = 2**20
_TINY: Mapping[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
# A sliding window shorter than the sequence needs a mask of length x length, even if no layer has a window.
_GEMMA: Mapping[str, Any] = {
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": None,
    "sliding_window": _MOST_POSITIONS,
}

SHAPES: dict[str, Shape] = {
    "tiny-llama": Shape("LlamaConfig", _TINY, tokens=64, limit=0.01),
    "tiny-gemma": Shape("Gemma2Config", {**_TINY, **_GEMMA}, tokens=64, limit=0.01),
    "tiny-qwen": Shape("Qwen3Config", _TINY, tokens=64, limit=0.01),
    "mid": Shape(
        "LlamaConfig",
        {
            "vocab_size": 32768,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        },
        tokens=1024,
        limit=2.0,
        steps=2,
    ),
    "gpt2": Shape(
        "LlamaConfig",
        {
            "vocab_size": 50257,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "tie_word_embeddings": True,
        },
        tokens=2048,
        limit=8.0,
        steps=10,
        rounds=7,
    ),
    "llama-3.2-1b": Shape(
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "gemma-2-2b": Shape(
        "Gemma2Config",
        {
            **_GEMMA,
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
        limit=32.0,
    ),
    "qwen3-4b": Shape(
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        limit=40.0,
    ),
}
"""Tiny ones for a test; "mid" for a CPU; a Llama with the sizes of GPT-2; and three models of 1 to 4 billion weights.

Gemma-2 is measured without sliding windows and without the softcap of attention, which SDPA does not have.
"""


def make_model(name: str, device: str, dtype: str, checkpointing: bool) -> Any:
    """Return the model, ready for training."""
    import torch
    import transformers

    torch.manual_seed(0)
    shape = SHAPES[name]
    config = getattr(transformers, shape.config)(
        **shape.fields,
        max_position_embeddings=_MOST_POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    # transformers 5 refuses SDPA for Gemma-2 because of the softcap of attention, which the configuration above lacks.
    gemma = transformers.Gemma2PreTrainedModel
    with patch.object(gemma, "_supports_sdpa", True), torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    if checkpointing:
        # The method was renamed in transformers 5.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.to(device).train()
