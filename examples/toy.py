"""Shared by the RL examples: the task of sorting digits, a small model, and a plot."""

from pathlib import Path

import torch
import transformers
from torch import Tensor

__all__ = ["DEVICE", "LENGTH", "draw", "make_model", "make_prompts", "sample", "share_sorted"]

LENGTH, DIGITS, SEPARATOR = 4, 10, 10
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model() -> transformers.LlamaForCausalLM:
    """Return a model with random weights, the same at each call."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=DIGITS + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2 * LENGTH + 1,
    )
    return transformers.LlamaForCausalLM(config).to(DEVICE)


def make_prompts(count: int, generator: torch.Generator) -> Tensor:
    """Return (count, LENGTH + 1) int64: random digits and a separator."""
    digits = torch.randint(DIGITS, (count, LENGTH), generator=generator)
    return torch.cat([digits, torch.full((count, 1), SEPARATOR)], -1).to(DEVICE)


@torch.no_grad()
def sample(model: transformers.LlamaForCausalLM, prompts: Tensor, temperature: float = 1.0) -> Tensor:
    """Return prompts and completions of LENGTH tokens, (N, 2 LENGTH + 1) int64."""
    tokens = prompts
    for _ in range(LENGTH):
        logits = model(tokens, logits_to_keep=1).logits[:, -1].float() / temperature
        tokens = torch.cat([tokens, logits.softmax(-1).multinomial(1)], -1)
    return tokens


def share_sorted(tokens: Tensor, descending: bool = False) -> Tensor:
    """Return the share of positions with the right digit for each completion, (N,) float32 in [0, 1]."""
    right = tokens[:, :LENGTH].sort(-1, descending=descending).values
    return (tokens[:, LENGTH + 1 :] == right).float().mean(-1)


def draw(path: Path, title: str, curves: dict[str, list[float]]) -> None:
    """Draw each curve over the steps, in one panel each, into a file. Only this needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 3), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False)
    for panel, (name, values) in zip(panels[0], curves.items(), strict=True):
        panel.plot(values)
        panel.set(title=name, xlabel="step")
        panel.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
