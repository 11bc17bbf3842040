"""The measured sizes, and the project's limits for them."""

from __future__ import annotations

from benchmarks.cases import Case, Goal

__all__ = ["make_cases"]

_SIZES = {"cuda": ((8192, 4096, 128256), (8192, 2048, 128256)), "cpu": ((96, 32, 250), (64, 16, 96))}
_CONTENDERS = (
    "products + all-reduce",
    "overlapped",
    "xent",
    "xent sequence parallel",
    "textbook",
    "loss_parallel",
    "Liger",
    "Liger logits",
)
_GOALS = {
    (4096, 2): (Goal("xent", "loop", 1.10), Goal("xent", "peak MiB", 1300)),
    (2048, 2): (Goal("xent", "loop", 1.15), Goal("xent", "peak MiB", 1000)),
    (4096, 4): (Goal("xent", "loop", 1.15),),
}
"""(hidden size, number of GPUs) -> limits."""


def make_cases(device: str, ranks: int, sizes: tuple[tuple[int, int, int], ...] = ()) -> list[Case]:
    """Return the cases of a device for `ranks` ranks; `sizes` (tokens, hidden, vocabulary) replace the default ones."""
    return [
        Case(
            "sharded",
            "sharded",
            *size,
            dtype="bfloat16" if device == "cuda" else "float32",
            contenders=_CONTENDERS,
            accuracy=True,
            goals=_GOALS.get((size[1], ranks), ()) if device == "cuda" and size in _SIZES["cuda"] else (),
            device=device,
            ranks=ranks,
        )
        for size in sizes or _SIZES[device]
    ]
