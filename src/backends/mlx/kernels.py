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

from xent.backends.mlx.elementwise import activate

__all__ = ["KERNELS", "Asked", "Found", "Kernels", "RowFacts", "Terms", "joined"]

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
    target_logits: mx.array | None
    """(R,) raw logits of the targets, which replace those in the block, because these were rounded to its dtype."""
    finite: bool
    """Whether the logits of dead rows are known to be finite, so that a gradient factor of 0 makes their gradient 0."""
    alone: bool
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
        self, z: mx.array, placed: Callable[[mx.array], mx.array] = lambda values: values[:, None]
    ) -> tuple[mx.array, mx.array | None]:
        """Return x and the softcap's slope, as `xent.backends.mlx.elementwise.activate` does, in the dtype of `weight`.

        `placed` reshapes values (R,) for broadcasting with z.
        """

        def given(name: str) -> mx.array:
            values = self.of_rows(name)
            return placed(values) if values.ndim else values

        scale, softcap = self.terms.scale, self.terms.softcap
        z = z.astype(self.weight.dtype)
        return activate(z, given("logit_scale") if scale else None, given("softcap") if softcap else None)

    def part(self, start: int, stop: int) -> RowFacts:
        """Return the facts of rows [start, stop)."""
        whole = ("numbers", "class_weight")
        named = {name: value for name, value in vars(self).items() if isinstance(value, mx.array) and name not in whole}
        cut: dict[str, Any] = {name: value[start:stop] for name, value in named.items()}
        return replace(self, **cut, upstream={name: value[start:stop] for name, value in self.upstream.items()})


@dataclass(frozen=True)
class Asked:
    """The results that the driver needs from a forward pass besides the loss."""

    grad: bool = False
    norm: bool = False
    nll: bool = False
    entropy: bool = False
    predictions: bool = False
    log_sum_sq_probs: bool = False
    mean_logit: bool = False
    dead: bool = False
    """Whether results other than loss and gradient are needed for dead rows too."""

    @classmethod
    def of(cls, stats: Collection[str], grad: bool) -> Asked:
        """Return the results that these statistics and the gradient need. The norm is for gradients computed later."""
        named = {name: name in stats for name in ("nll", "entropy", "log_sum_sq_probs", "mean_logit")}
        predictions = "predictions" in stats or "accuracy" in stats
        return cls(grad, norm=True, predictions=predictions, dead=bool(stats), **named)


@dataclass(frozen=True, eq=False)
class Found:
    """The results of a forward pass for R rows, in the dtype of `RowFacts.weight`. Those not requested are None.

    Only `loss` and `grad` must be 0 in dead rows; the driver masks the others.
    """

    loss: mx.array
    """(R,) l_i, including the z-loss."""
    grad: mx.array | None = None
    """(R, V), the logits' dtype: the gradient with respect to the raw logits, with factor `scale` instead of a_i."""
    norm: mx.array | None = None
    """(R, 2): the largest x, and log sum_c exp(x_c - largest). Their sum, lse, would be rounded."""
    nll: mx.array | None = None
    """(R,) lse - x_y; for class probabilities q, without smoothing, sum_c q_c (lse - x_c)."""
    entropy: mx.array | None = None
    """(R,) -sum_c p_c log p_c."""
    predictions: mx.array | None = None
    """(R,) int32: the class of the largest logit_scale * z, before the softcap; among equals the lowest."""
    log_sum_sq_probs: mx.array | None = None
    """(R,) log sum_c p_c^2."""
    mean_logit: mx.array | None = None
    """(R,) the mean of x_c over classes."""

    def arrays(self) -> list[mx.array]:
        """Return all results, for the next block to depend on."""
        return [value for value in vars(self).values() if value is not None]


@dataclass(frozen=True)
class Kernels:
    """The row kernel of a device, as two functions of an (R, V) block of raw logits with R, V >= 1, of any strides."""

    forward: Callable[[mx.array, RowFacts, Asked], Found]
    """Compute the losses and the requested results of a block."""
    backward: Callable[[mx.array, RowFacts, mx.array], mx.array]
    """Compute the gradient (R, V) of a block from `Found.norm` (R, 2), for the present `scale` of the facts."""


KERNELS: dict[str, Kernels] = {}
"""Backend -> its row kernel. The module of the kernel registers it, and the backend imports that module."""


def joined(parts: Sequence[Found]) -> Found:
    """Concatenate the per-row results of blocks, without gradients."""
    named = {}
    for name in vars(parts[0]):
        values = [getattr(part, name) for part in parts]
        if name != "grad" and values[0] is not None:
            named[name] = values[0] if len(values) == 1 else mx.concatenate(values)
    return Found(**named)
