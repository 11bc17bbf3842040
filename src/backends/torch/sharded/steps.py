"""The interface of a backend for one rank's classes: fold a block of logits, merge sums, write the gradient.

`plain` implements it in PyTorch operations for every device. A backend with kernels registers its own in `STEPS`.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts
from xent.backends.torch.job import Taken
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.results import Results
from xent.backends.torch.schedule import Part
from xent.backends.torch.sharded.layout import Layout
from xent.backends.torch.sharded.sums import Slots

__all__ = ["STEPS", "Coefficients", "Landing", "Shard", "Starter", "Steps", "Weights"]


class Shard(NamedTuple):
    """The rows of a call on one rank, in the order in which they are computed."""

    facts: Facts
    """`target` and `vocabulary` refer to the whole vocabulary, `class_weight` and `probabilities` to this shard."""
    layout: Layout
    local: Tensor | None
    """(N,) int64: each target relative to this shard's first class. Outside of [0, C) if another rank has it."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums and results."""
        return self.facts.weight.dtype


class Weights(NamedTuple):
    """Class weights of the other ranks' classes, as far as a rank needs them."""

    of_rows: Tensor
    """(N,): the weight w_y of each target, in the order of the call."""
    of_ranks: Tensor
    """(ranks,): the sum of w over each rank's classes."""
    total: Tensor
    """(N,): the sum W of w over all classes, the same value in each row."""


class Landing(NamedTuple):
    """The buffers for the results of a part's rows."""

    part: Part
    results: Results
    """Results of all rows, in the order in which they are computed."""
    kept: Tensor | None
    """(K, N), in the order of the call: the data for the backward pass that
    `xent.backends.torch.sharded.finish.kept_names` lists.
    """
    truth: Tensor | None
    """(N,) int64, in the order of `results`: the most probable class of the target, for the accuracy with class
    probabilities.
    """
    weights: Weights | None
    """None if there are no class weights, and for class probabilities."""
    wanted: bool
    """Whether the coefficients of the gradient are needed."""


class Coefficients(NamedTuple):
    """Coefficients of the gradient of R rows, each (R,).

        g_c = p_c (alpha + beta log p_c) - delta_c, times dx/dz, for c other than the target
        p_c = exp((x_c - peak) - log_sum)

    At the row's target the gradient is `target`. Outside of the row's support it is 0. delta_c is delta w_c, or share
    w_c q'_c + nll q_c for class probabilities q.
    """

    peak: Tensor
    log_sum: Tensor
    alpha: Tensor
    beta: Tensor | None
    delta: Tensor | None
    share: Tensor | None
    nll: Tensor | None
    target: Tensor | None
    zero: Tensor | None
    """(R,) bool: rows whose gradient is exactly 0, whatever their logits are; None if there are no such rows."""

    def of(self, rows: slice) -> "Coefficients":
        """Return the coefficients of some rows."""
        some: list[Any] = [None if values is None else values[rows] for values in self]
        return Coefficients(*some)


class Steps(Protocol):
    """The steps for logits z (R, C) of rows [start, start + R) and the C classes of one rank."""

    def take(self, linear: Linear, part: Part) -> Taken:
        """Return the hidden states of a part, and its targets' logits if C > 0 and the compute dtype rounds logits."""

    def fold(self, logits: Tensor, start: int, sums: Slots, target_logits: Tensor | None) -> None:
        """Write the sums of these rows to `sums` (K, R). C may be 0.

        `target_logits` (R,) float32 replace the rounded logits of targets on this rank.
        """

    def land(self, sums: Slots, landing: Landing) -> Coefficients | None:
        """Merge the sums of all ranks, (ranks, K, R). Record the results of a part. Return coefficients if wanted."""

    def again(self, kept: Tensor, part: Part) -> Coefficients:
        """Return the coefficients of a part from the saved data `kept` (K, N)."""

    def gradient(self, logits: Tensor, start: int, coefficients: Coefficients, grad: Tensor) -> None:
        """Write the gradient (R, C) with respect to z; `grad` may be `logits`."""


class Starter(Protocol):
    """A function that a backend registers."""

    def __call__(self, shard: Shard) -> Steps:
        """Return the steps for the rows of one call."""


STEPS: dict[str, Starter] = {}
"""The registered functions, by the name of the backend."""
