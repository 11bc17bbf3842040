"""What the MLX driver asks of a device's row kernel.

MLX arrays are values: a kernel returns its results, and "in place" means that the gradient may take the memory of
logits that nobody else holds. The driver never hands over an empty block, slices the facts to the block's rows, ties
the blocks to each other, and makes losses and statistics of what a kernel returns. A kernel evaluates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

__all__ = ["KERNELS", "Asked", "Found", "Kernels", "RowFacts", "Terms", "joined"]

_NUMBERS = ("label_smoothing", "z_loss", "softcap", "logit_scale", "spread", "total_weight")


@dataclass(frozen=True)
class Terms:
    """Which terms the loss has. They are fixed for a call, so that a kernel may be built for each combination."""

    smoothing: bool
    z_loss: bool
    softcap: bool
    scale: bool
    """Whether the logits are scaled, by something other than 1 as far as is known; so they are where rows are bent."""


@dataclass(frozen=True, eq=False)
class RowFacts:
    """What is known about R rows of V raw logits. Floats are float32, or float64 for float64 logits."""

    terms: Terms
    numbers: mx.array
    """(8,) label_smoothing e, z_loss, softcap k, logit_scale s, "spread" e / V, "total_weight" sum_c w_c (V without
    class weights), 0, 0.

    Eight of them, because a Metal kernel gets fewer in another address space; an array, because a compiled function
    would be traced again for every new value of a Python number.
    """
    target: mx.array | None
    """(R,) int32 in [0, V), whatever the caller passed for ignored and invalid rows; None for probabilities."""
    probabilities: mx.array | None
    """(R, V) in the caller's float dtype; None for class indices. Class weights and smoothing are not in them."""
    weight: mx.array
    """(R,) a_i; NaN where the target is out of range, so that the row's loss is NaN."""
    scale: mx.array
    """(R,) factor of the gradient: a_i, over the divisor for "mean", times the upstream gradient where it is known."""
    dead: mx.array
    """(R,) bool: rows whose loss and gradient are exactly 0, whatever their logits hold."""
    class_weight: mx.array | None
    """(V,)"""
    target_logits: mx.array | None
    """(R,) raw logits of the targets, taking the place of those in the block, which were rounded to its dtype."""
    finite: bool
    """Whether dead rows hold finite logits, whose product with a scale of 0 is 0 without further ado."""
    alone: bool
    """Whether the block is all there is, so that its gradient should be the one thing of its size that is made."""
    upstream: Mapping[str, mx.array] = field(default_factory=dict)
    """(R,) upstream gradients of "lse", "nll" and "entropy", and with that "H", the entropy itself; in backward passes,
    in which `scale` has the upstream gradient of the loss."""
    first: int = 0
    """The first class of the block in the vocabulary."""
    inside: mx.array | None = None
    """(R,) bool: whether the target is among the block's classes; None where all classes are."""
    bend: mx.array | None = None
    """(R, 2): the logit_scale and the softcap of each row, which has a temperature, in place of those in `numbers`; the
    order of a row's logits is that of `numbers`. NaN where the temperature is not > 0."""

    def of_rows(self, name: str) -> mx.array:
        """Return "logit_scale" or "softcap", (R,) where rows have their own, else 0-d."""
        return self.number(name) if self.bend is None else self.bend[:, ("logit_scale", "softcap").index(name)]

    def number(self, name: str) -> mx.array:
        """Return the number of an option, 0-d."""
        place = _NUMBERS.index(name)
        return self.numbers[place : place + 1].reshape(())

    def part(self, start: int, stop: int) -> RowFacts:
        """Return the facts of rows [start, stop)."""
        whole = ("numbers", "class_weight")
        named = {name: value for name, value in vars(self).items() if isinstance(value, mx.array) and name not in whole}
        cut: dict[str, Any] = {name: value[start:stop] for name, value in named.items()}
        return replace(self, **cut, upstream={name: value[start:stop] for name, value in self.upstream.items()})

    def classes(self, first: int, count: int) -> RowFacts:
        """Return the facts for blocks of classes [first, first + count), targets counted from there."""
        some = slice(first, first + count)
        weight = None if self.class_weight is None else self.class_weight[some]
        probabilities = None if self.probabilities is None else self.probabilities[:, some]
        made = replace(self, class_weight=weight, probabilities=probabilities, first=first)
        if self.target is None:
            return made
        inside = (self.target >= first) & (self.target < first + count)
        return replace(made, target=mx.where(inside, self.target - first, 0), inside=inside)


@dataclass(frozen=True)
class Asked:
    """Which results the driver wants from a forward pass besides the loss."""

    grad: bool = False
    norm: bool = False
    nll: bool = False
    entropy: bool = False
    predictions: bool = False
    log_sum_sq_probs: bool = False
    mean_logit: bool = False
    dead: bool = False
    """Whether the results besides loss and gradient are wanted of dead rows too."""

    @classmethod
    def of(cls, stats: Collection[str], grad: bool) -> Asked:
        """Return what statistics and the gradient take, and the norm, of which later gradients are made."""
        named = {name: name in stats for name in ("nll", "entropy", "log_sum_sq_probs", "mean_logit")}
        predictions = "predictions" in stats or "accuracy" in stats
        return cls(grad, norm=True, predictions=predictions, dead=bool(stats), **named)


@dataclass(frozen=True, eq=False)
class Found:
    """What a forward pass found out about R rows; None where nobody asked. Floats in the dtype of `RowFacts.weight`.

    Only `loss` and `grad` have to be 0 in dead rows; the driver masks the others.
    """

    loss: mx.array
    """(R,) l_i, z term included."""
    grad: mx.array | None = None
    """(R, V), the logits' dtype: the gradient with respect to the raw logits, `scale` in it in place of a_i."""
    norm: mx.array | None = None
    """(R, 2): the largest x, and log sum_c exp(x_c - largest); apart, as their sum would round."""
    nll: mx.array | None = None
    """(R,) lse - x_y; sum_c q_c (lse - x_c) for probabilities q as the caller gave them."""
    entropy: mx.array | None = None
    """(R,) -sum_c p_c log p_c."""
    predictions: mx.array | None = None
    """(R,) int32: the class of the largest logit_scale * z, before the softcap, the lowest among equals."""
    log_sum_sq_probs: mx.array | None = None
    """(R,) log sum_c p_c^2."""
    mean_logit: mx.array | None = None
    """(R,) the mean of x_c over classes."""

    def arrays(self) -> list[mx.array]:
        """Return all that was found out, for the next block to wait for."""
        return [value for value in vars(self).values() if value is not None]


@dataclass(frozen=True)
class Kernels:
    """The row kernel of a device, as two functions of an (R, V) block of raw logits with R, V >= 1, of any strides."""

    forward: Callable[[mx.array, RowFacts, Asked], Found]
    """Take a block: losses, and what else is asked for."""
    backward: Callable[[mx.array, RowFacts, mx.array], mx.array]
    """Return the gradient (R, V) of a block from `Found.norm` (R, 2), for the `scale` that the facts have now."""


KERNELS: dict[str, Kernels] = {}
"""By backend: its row kernel. The module that has the kernel registers it, and the backend imports that module."""


def joined(parts: Sequence[Found]) -> Found:
    """Return the per-row results of blocks one after the other, without gradients."""
    named = {}
    for name in vars(parts[0]):
        values = [getattr(part, name) for part in parts]
        if name != "grad" and values[0] is not None:
            named[name] = values[0] if len(values) == 1 else mx.concatenate(values)
    return Found(**named)
