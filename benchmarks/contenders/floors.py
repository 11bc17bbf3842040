"""The floors: work that every implementation has to do. They show how much time could still be saved.

For logits this is one read and one write (`copy_`), or without gradient one read (`amax`). For the linear function it
is the matrix products alone, or only the forward product, with the vocabulary rounded up to a multiple of 64, for which
the library's kernels are fast. Their results are written to memory that was allocated before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case
from benchmarks.contenders.entry import Contender, LossFunction

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CONTENDERS"]

_MULTIPLE = 64


class _Buffers:
    """Buffers by name, allocated at the first request, which is in the warm-up."""

    def __init__(self) -> None:
        self._made: dict[str, Tensor] = {}

    def __call__(self, name: str, like: Tensor, *shape: int) -> Tensor:
        if name not in self._made:
            self._made[name] = like.new_empty(shape)
        return self._made[name]

    def has(self, name: str) -> bool:
        """Whether this buffer was allocated."""
        return name in self._made


def _copy(case: Case) -> LossFunction:
    buffers = _Buffers()

    def copy(logits: Tensor, target: Tensor) -> Tensor:
        return buffers("copy", logits, *logits.shape).copy_(logits)

    return copy


def _amax(case: Case) -> LossFunction:
    import torch

    buffers = _Buffers()

    def amax(logits: Tensor, target: Tensor) -> Tensor:
        return torch.amax(logits, -1, out=buffers("maxima", logits, *logits.shape[:-1]))

    return amax


def _products(case: Case) -> LossFunction:
    """Return the matrix products. The logits are used as their own gradient, which takes the same time."""
    import torch

    buffers = _Buffers()
    whole = -(-case.vocabulary // _MULTIPLE) * _MULTIPLE

    def padded(weight: Tensor) -> Tensor:
        if len(weight) == whole:
            return weight
        if not buffers.has("padded"):
            buffers("padded", weight, whole, weight.shape[1]).zero_()[: len(weight)].copy_(weight)
        return buffers("padded", weight, whole, weight.shape[1])

    kept = case.tokens if not case.ignored else round(case.tokens * (1 - case.ignored))

    def products(input: Tensor, weight: Tensor, *_: Tensor) -> Any:
        rows, weight = input[:kept], padded(weight)
        logits = torch.mm(rows, weight.T, out=buffers("logits", rows, len(rows), len(weight)))
        if case.backward and "input" in case.trained:
            torch.mm(logits, weight, out=buffers("input", rows, *rows.shape))
        if case.backward and "weight" in case.trained:
            torch.mm(logits.T, rows, out=buffers("weight", weight, *weight.shape))
        return logits

    return products


def _product(case: Case) -> LossFunction:
    return _products(replace(case, backward=False))


CONTENDERS: tuple[Contender, ...] = (
    Contender("products", "linear", _products, kind="floor"),
    Contender("copy", "logits", _copy, kind="floor"),
    Contender("amax", "logits", _amax, kind="floor"),
    Contender("products", "linear log-probabilities", _products, kind="floor"),
    Contender("copy", "log-probabilities", _copy, kind="floor"),
    Contender("amax", "log-probabilities", _amax, kind="floor"),
    Contender("product", "linear divergence", _product, kind="floor"),
)
