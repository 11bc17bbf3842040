"""The measured models, with random weights, without downloads."""

from __future__ import annotations

from typing import Any

__all__ = ["MODELS", "make_model"]

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "mid": {
        "vocab_size": 32768,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "gpt2": {
        "vocab_size": 50257,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "tie_word_embeddings": True,
    },
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
}
"""Llama configurations: for a test, for a CPU, with the sizes of GPT-2, and of Llama-3.2-1B."""


def make_model(name: str, device: str, dtype: str, checkpointing: bool, length: int) -> Any:
    """Return the model, ready for training."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **MODELS[name], max_position_embeddings=length, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    if checkpointing:
        # The method was renamed in transformers 5.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.to(device).train()
