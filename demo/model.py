"""A small decoder-only transformer that returns hidden states, so that the loss computes the logits."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LanguageModel"]

INITIAL_SCALE = 0.02


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to earlier positions: (batch, time, width) to the same shape."""
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One pre-norm layer: attention, then a two-layer perceptron, both with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, time, width)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.perceptron(self.perceptron_norm(x))


class LanguageModel(nn.Module):
    """A model from token ids to hidden states. `head.weight` (vocabulary, width) is the classifier.

    The head shares its weight with the token embedding, as in most models of this size. Its gradient is then the sum of
    both uses, which a loss that overwrites gradients instead of accumulating them would get wrong.
    """

    def __init__(self, vocabulary: int, context: int, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return hidden states (batch, time, width) for token ids (batch, time)."""
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.norm(self.blocks(self.token(tokens) + self.position(positions)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INITIAL_SCALE)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
