"""Shared by the examples: a small model of transformers, and real text, the documentation that is part of Python."""

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
import transformers
from torch import Tensor

__all__ = ["batches", "make_model"]

VOCABULARY = 256  # bytes


def make_model() -> transformers.LlamaForCausalLM:
    """Return a model with the same random weights in every process."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def batches(steps: int, rows: int = 8, length: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, labels), both (rows, length) int64. The labels of a prompt of random length are masked."""
    text = torch.tensor(list("".join(topics[name] for name in sorted(topics)).encode()))
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
        tokens = text[starts + torch.arange(length)]
        prompts = torch.randint(length, (rows, 1), generator=generator)
        yield tokens, tokens.masked_fill(torch.arange(length) < prompts, -100)
