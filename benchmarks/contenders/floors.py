"""The floors: work that every implementation has to do. They show how much time could still be saved.

For logits this is one read and one write (`copy_`), or without gradient one read (`amax`). For the linear function it
is the matrix products alone, or only the forward product, with the vocabulary rounded up to a multiple of 64, for which
the library's kernels are fast. Their results are written to memory that was allocated by the first call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case
from benchmarks.contenders.entry import LossFunction, contender

if TYPE_CHECKING:
    from torch import Tensor

__all__: list[str] = []

_MULTIPLE = 64


@contender("copy", "logits", "log-probabilities", kind="floor")
def _copy(case: Case) -> LossFunction:
    made: list[Tensor] = []

    def copy(logits: Tensor, target: Tensor) -> Tensor:
        if not made:
            made.append(logits.new_empty(logits.shape))
        return made[0].copy_(logits)

    return copy


@contender("amax", "logits", "log-probabilities", kind="floor")
def _amax(case: Case) -> LossFunction:
    import torch

    made: list[Tensor] = []

    def amax(logits: Tensor, target: Tensor) -> Tensor:
        if not made:
            made.append(logits.new_empty(logits.shape[:-1]))
        return torch.amax(logits, -1, out=made[0])

    return amax


@contender("products", "linear", "linear log-probabilities", kind="floor")
def _products(case: Case) -> LossFunction:
    """Return the matrix products. The logits are used as their own gradient, which takes the same time."""
    import torch

    made: list[Tensor] = []
    whole = -(-case.vocabulary // _MULTIPLE) * _MULTIPLE
    kept = round(case.tokens * (1 - case.ignored))

    def products(input: Tensor, weight: Tensor, *_: Tensor) -> Any:
        rows = input[:kept]
        if not made:
            padded = weight if len(weight) == whole else weight.new_zeros(whole, weight.shape[1])
            if padded is not weight:
                padded[: len(weight)].copy_(weight)
            made.extend((padded, *map(rows.new_empty, ((kept, whole), rows.shape, padded.shape))))
        weight, logits, of_input, of_weight = made
        torch.mm(rows, weight.T, out=logits)
        if case.backward and "input" in case.trained:
            torch.mm(logits, weight, out=of_input)
        if case.backward and "weight" in case.trained:
            torch.mm(logits.T, rows, out=of_weight)
        return logits

    return products


@contender("product", "linear divergence", kind="floor")
def _product(case: Case) -> LossFunction:
    return _products(replace(case, backward=False))
