"""What a backend does with one rank's classes: fold a block of logits, land the sums, write the gradient.

`plain` has it all in PyTorch's own operations, for every device. A backend with kernels registers its own in `STEPS`.
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
    """The rows of a call in the order in which they are computed, as one rank sees them."""

    facts: Facts
    """`target` and `vocabulary` are of the whole vocabulary, `class_weight` and `probabilities` of this shard."""
    layout: Layout
    local: Tensor | None
    """(N,) int64: each target as a class of this shard, outside of [0, C) where another rank has it."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums and results."""
        return self.facts.weight.dtype


class Weights(NamedTuple):
    """Class weights, as far as a rank knows those of others."""

    of_rows: Tensor
    """(N,) w_y, in the order of the call."""
    of_ranks: Tensor
    """(ranks,) the sum of w over each rank's classes."""
    total: Tensor
    """(N,) W, the same in each row."""


class Landing(NamedTuple):
    """Where the results of a part's rows go."""

    part: Part
    results: Results
    """Of all rows, in the order in which they are computed."""
    kept: Tensor | None
    """(K, N), for backward, in the order of the call: what `xent.backends.torch.sharded.finish.kept_names` lists."""
    truth: Tensor | None
    """(N,) int64: the most probable class, as `results` are; where class probabilities have an accuracy."""
    weights: Weights | None
    """None where all classes weigh 1, and for class probabilities."""
    wanted: bool
    """Whether there will be a gradient."""


class Coefficients(NamedTuple):
    """R rows' gradients: g_c = p_c (alpha + beta log p_c) - delta_c, times dx/dz, and `target` at the row's target.

    p_c = exp((x_c - peak) - log_sum), and g_c = 0 for a class outside of the row's support. delta_c is delta w_c, or
    share w_c q'_c + nll q_c for class probabilities q.
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
    """(R,) bool: rows whose gradient is exactly 0, whatever their logits hold; None where there are none."""

    def of(self, rows: slice) -> "Coefficients":
        """Return those of some rows."""
        some: list[Any] = [None if values is None else values[rows] for values in self]
        return Coefficients(*some)


class Steps(Protocol):
    """The steps on the logits of one rank's C classes, z (R, C), of rows [start, start + R), and on the rows' sums."""

    def take(self, linear: Linear, part: Part) -> Taken:
        """Return the hidden states of a part; where the compute dtype rounds, also its targets' logits, if C > 0."""

    def fold(self, logits: Tensor, start: int, sums: Slots, target_logits: Tensor | None) -> None:
        """Write the sums of these rows to `sums`, (K, R); C may be 0.

        `target_logits` (R,) float32 replace the targets' logits, which were rounded, where the target is here.
        """

    def land(self, sums: Slots, landing: Landing) -> Coefficients | None:
        """Record the results of a part from the sums of all ranks, (ranks, K, R); return its coefficients if wanted."""

    def again(self, kept: Tensor, part: Part) -> Coefficients:
        """Return the coefficients of a part from what was kept, (K, N)."""

    def gradient(self, logits: Tensor, start: int, coefficients: Coefficients, grad: Tensor) -> None:
        """Write the gradient (R, C) with respect to z; `grad` may be `logits`."""


class Starter(Protocol):
    """What a backend registers."""

    def __call__(self, shard: Shard) -> Steps:
        """Return the steps for the rows of one call."""


STEPS: dict[str, Starter] = {}
"""By backend."""
