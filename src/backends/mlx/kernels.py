"""The interface of a device's row kernel in the MLX driver.

MLX arrays are immutable: a kernel returns its results, and "in place" means that the gradient may reuse the memory of
logits that nothing else refers to. The driver slices the facts to the rows of a block, never passes an empty block,
makes each block depend on the one before, and computes losses and statistics from the results of a kernel. A kernel
does not evaluate arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

__all__ = ["KERNELS", "Kernels", "Results", "RowFacts", "Terms", "activate", "asked", "joined"]

_NUMBERS = ("label_smoothing", "z_loss", "softcap", "logit_scale", "spread", "total_weight")


@dataclass(frozen=True)
class Terms:
    """The terms of the loss. They are fixed for a call, so that a kernel can be compiled for each combination."""

    smoothing: bool
    z_loss: bool
    softcap: bool
    scale: bool
    """Whether logits have a scale other than 1, or one whose value is unknown, or one per row."""


@dataclass(frozen=True, eq=False)
class RowFacts:
    """The facts of R rows of V raw logits. Floats are float32, or float64 for float64 logits."""

    terms: Terms
    numbers: mx.array
    """(8,) label_smoothing e, z_loss, softcap k, logit_scale s, "spread" e / V, "total_weight" sum_c w_c (V without
    class weights), 0, 0.

    There are eight because MLX passes smaller arrays to a Metal kernel in another address space. They are an array
    because a compiled function would be traced again for each new value of a Python number.
    """
    target: mx.array | None
    """(R,) int32 in [0, V); ignored and invalid rows have some valid class. None for class probabilities."""
    probabilities: mx.array | None
    """(R, V) in the caller's float dtype, without class weights and smoothing; None for class indices."""
    weight: mx.array
    """(R,) a_i; NaN if the target is out of range, so that the row's loss is NaN."""
    scale: mx.array
    """(R,) gradient factor: a_i, divided by the divisor for "mean", times the upstream gradient if it is known."""
    dead: mx.array
    """(R,) bool: rows whose loss and gradient are exactly 0, even if their logits are NaN."""
    class_weight: mx.array | None
    """(V,)"""
    target_logits: mx.array | None = None
    """(R,) raw logits of the targets, which replace those in the block, because these were rounded to its dtype."""
    finite: bool = False
    """Whether the logits of dead rows are known to be finite, so that a gradient factor of 0 makes their gradient 0."""
    alone: bool = False
    """Whether the block is the whole call. Its gradient should then be the only array of its size."""
    upstream: Mapping[str, mx.array] = field(default_factory=dict)
    """In backward passes: (R,) upstream gradients of "lse", "nll" and "entropy", and with the latter "H", the entropy
    itself. `scale` includes the upstream gradient of the loss."""
    bend: mx.array | None = None
    """(R, 2): logit_scale and softcap of each row, which replace those in `numbers` if rows have temperatures. The sign
    of the scale is that in `numbers`. NaN if the temperature is not > 0."""

    def of_rows(self, name: str) -> mx.array:
        """Return "logit_scale" or "softcap": (R,) if rows have their own, otherwise 0-d."""
        return self.number(name) if self.bend is None else self.bend[:, ("logit_scale", "softcap").index(name)]

    def number(self, name: str) -> mx.array:
        """Return the value of an option, 0-d."""
        place = _NUMBERS.index(name)
        return self.numbers[place : place + 1].reshape(())

    def activate(
        self, z: mx.array, over: Callable[[mx.array], mx.array] = lambda values: values[:, None]
    ) -> tuple[mx.array, mx.array | None]:
        """Return `activate` of logits in the dtype of `weight`. `over` reshapes values (R,) for broadcasting with z."""
        wanted = {"logit_scale": self.terms.scale, "softcap": self.terms.softcap}
        values = [self.of_rows(name) if present else None for name, present in wanted.items()]
        bends = [over(value) if value is not None and value.ndim else value for value in values]
        return activate(z.astype(self.weight.dtype), *bends)

    def part(self, rows: slice) -> RowFacts:
        """Return the facts of some rows."""
        whole = ("numbers", "class_weight")
        named = {name: value for name, value in vars(self).items() if isinstance(value, mx.array) and name not in whole}
        cut: dict[str, Any] = {name: value[rows] for name, value in named.items()}
        return replace(self, **cut, upstream={name: value[rows] for name, value in self.upstream.items()})


Results = dict[str, mx.array]
"""The results of a forward pass for R rows by name, in the dtype of `RowFacts.weight`:

- loss: (R,) l_i, including the z-loss.
- grad: (R, V), the logits' dtype: the gradient with respect to the raw logits, with factor `scale` instead of a_i.
- norm: (R, 2): the largest x, and log sum_c exp(x_c - largest). Their sum, lse, would be rounded.
- nll: (R,) lse - x_y; for class probabilities q, without smoothing, sum_c q_c (lse - x_c).
- entropy: (R,) -sum_c p_c log p_c.
- predictions: (R,) int32: the class of the largest logit_scale * z, before the softcap; among equals the lowest.
- log_sum_sq_probs: (R,) log sum_c p_c^2.
- mean_logit: (R,) the mean of x_c over classes.

Only loss and grad must be 0 in dead rows; the driver masks the others.
"""


@dataclass(frozen=True)
class Kernels:
    """The row kernel of a device, as two functions of an (R, V) block of raw logits with R, V >= 1, of any strides."""

    forward: Callable[[mx.array, RowFacts, Collection[str]], Results]
    """Compute the results that the third argument names: "loss" and others. It has "dead" too, if results other than
    loss and gradient are needed for dead rows; other names have no meaning."""
    backward: Callable[[mx.array, RowFacts, mx.array], mx.array]
    """Compute the gradient (R, V) of a block from the result norm (R, 2), for the present `scale` of the facts."""


KERNELS: dict[str, Kernels] = {}
"""Backend -> its row kernel. The module of the kernel registers it, and the backend imports that module."""


def asked(stats: Collection[str], grad: bool) -> set[str]:
    """Return the names of the results that these statistics and the gradient need.

    The norm is for statistics, and for gradients that are computed later.
    """
    found = {"loss", "norm", *stats}
    if stats:
        found.add("dead")
    if "accuracy" in stats:
        found.add("predictions")
    return found | {"grad"} if grad else found


def joined(parts: Sequence[Results]) -> Results:
    """Concatenate the results of blocks."""
    if len(parts) == 1:
        return parts[0]
    return {name: mx.concatenate([part[name] for part in parts]) for name in parts[0]}


def activate(z: mx.array, scale: Any, softcap: Any) -> tuple[mx.array, mx.array | None]:
    """Return x = k tanh(s z / k), or s z without softcap k, and the softcap's slope, None without softcap.

    The slope does not include the factor s. It is not computed as 1 - tanh^2, which would cancel. `scale` and `softcap`
    are numbers, or arrays that are broadcast with z; None for neither.
    """
    x = z if scale is None or (isinstance(scale, (int, float)) and scale == 1) else z * scale
    if softcap is None:
        return x, None
    inside = x / softcap
    return softcap * mx.tanh(inside), 1 / mx.square(mx.cosh(inside))
