"""The shapes that `python -m xent bench` knows by a model's name, and an estimate of the memory of a shape."""

from dataclasses import dataclass

from xent.core.chunks import rows_per_chunk

__all__ = ["HEADS", "Shape", "parse"]


@dataclass(frozen=True)
class Shape:
    """Hidden states (N, D) and a classifier (V, D)."""

    rows: int
    width: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.width}x{self.vocabulary}"

    def inputs(self, itemsize: int) -> int:
        """Return the size of hidden states and classifier in bytes."""
        return (self.rows + self.vocabulary) * self.width * itemsize

    def needed(self, itemsize: int, fused: bool) -> int:
        """Return the approximate bytes of a forward and backward pass, including inputs and their gradients.

        The unfused loss stores the logits, their float32 copy, the log-probabilities, and two gradients. The fused loss
        stores one chunk of these, on a GPU a larger one than on a CPU.
        """
        chunk = rows_per_chunk(self.rows, self.vocabulary, itemsize, None, "cuda", sums=True)
        held = (chunk if fused else 2 * self.rows) * self.vocabulary
        return 2 * self.inputs(itemsize) + held * (itemsize + 4)


HEADS = {
    "Llama-3-8B": (4096, 128256),
    "Gemma-2-9B": (3584, 256000),
    "Qwen3-8B": (4096, 151936),
    "GPT-2": (768, 50257),
}
"""(D, V) of the models' language modelling heads."""


def parse(text: str, rows: int) -> Shape:
    """Return the shape for "NxDxV", or for a model's name with `rows` rows; raise ValueError for other texts."""
    known = {name.lower(): head for name, head in HEADS.items()}
    if text.lower() in known:
        return Shape(rows, *known[text.lower()])
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"shape must be NxDxV, three numbers > 0, or one of {', '.join(HEADS)}; got {text!r}")
    return Shape(*map(int, parts))
