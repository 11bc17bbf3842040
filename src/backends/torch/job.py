"""The interface that a backend of the PyTorch driver implements: a job computes the rows of one call.

The driver contains autograd, the loop over chunks, and matrix products. The job contains everything between the logits
of a row and its loss. A backend registers the function that starts a job (`STARTERS`).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.torch.schedule import Part
from xent.core.spec import LossSpec

__all__ = ["STARTERS", "Job", "Starter", "Taken", "Upstream", "scale", "start"]


class Taken(NamedTuple):
    """Hidden states (R, D) of a part, in the compute dtype."""

    hidden: Tensor
    trained: Tensor
    """The same, with 0 in rows without a gradient, so that a NaN there does not reach the classifier's gradient."""
    target_logits: Tensor | None
    """(R,) float32; None for class probabilities, and if the compute dtype is float32 or float64."""


class Upstream(NamedTuple):
    """The upstream gradients of a call's results, (N,) each; None for results that were not used."""

    loss: Tensor | None = None
    """The gradient of the rows' losses; 0-d for a reduced loss."""
    lse: Tensor | None = None
    nll: Tensor | None = None
    entropy: Tensor | None = None


class Job(Protocol):
    """The computation of N rows, in any order, all at once or in parts. `finish` returns the results."""

    spec: LossSpec
    count: int
    deferred: Tensor | None
    """0-d factor of the gradients of a `narrow` job, which the backward pass multiplies in."""

    def partition(self, several: bool) -> tuple[Tensor | None, int | Tensor]:
        """Move the rows that must be computed to the front.

        Return the order (N,) int64, or None if it is that of the call, and the number of these rows: a 0-d int64 tensor
        if the host cannot read it without waiting. `several`: whether there are several chunks, so that skipping rows
        can save time although the host has to wait.
        """

    def learn(self, number: int) -> None:
        """Receive the number of `partition` if it was a tensor. If it is `count`, the order is that of the call."""

    def logits(self, logits: Tensor, grad: Tensor | None, norm: Tensor | None) -> None:
        """Fold and finish all rows of logits (..., V) of any strides. Write the gradient of the reduced loss to `grad`.

        `grad` may be `logits`. Write to `norm` (3, N) the parts of the log-sum-exp that `gradient` needs.
        """

    def gradient(self, logits: Tensor, grad: Tensor, norm: Tensor | None, entropy: Tensor | None) -> None:
        """Write the gradient of all rows, with the `norm` from `logits`.

        `entropy` (N,) is that of the forward pass. It is given if there is an upstream gradient of the entropy.
        """

    def take(self, linear: Linear, part: Part) -> Taken:
        """Gather the hidden states of a part and compute the logits of its targets."""

    def chunk(self, logits: Tensor, part: Part, grad: Tensor | None, target_logits: Tensor | None) -> None:
        """Do the same as `logits` for the logits (R, V) of a part; `target_logits` replace those of the targets."""

    def tiles(self, linear: Linear, norm: Tensor | None) -> bool:
        """Fold and finish all rows without materialising their logits. Return False if the backend cannot.

        The data that `multiply` needs is written to `norm`, as `new_norm` returned it.
        """

    def new_norm(self, linear: Linear) -> Tensor | None:
        """Return a buffer for the data that `multiply` needs of all rows; None if `multiply` cannot serve the call."""

    def multiply(
        self, linear: Linear, taken: Taken, part: Part, grad: Tensor, norm: Tensor, entropy: Tensor | None
    ) -> None:
        """Write the gradient (R, columns) of a part's logits without storing logits; 0 beyond the vocabulary."""

    def finish(self) -> tuple[Tensor, list[Tensor]]:
        """Return the reduced loss, and the statistics in the order of the spec, those per row as (N,)."""


class Starter(Protocol):
    """The function that a backend registers to start a job."""

    def __call__(
        self, options: Options, vocabulary: int, dtype: torch.dtype, shift: int, upstream: Upstream | None, narrow: bool
    ) -> Job:
        """Start a job on logits of `dtype`.

        Row t of a sequence has the target at t + shift. With `upstream`, gradients are for these upstream gradients,
        otherwise for the reduced loss. `narrow`: gradients are stored in float16 and scaled to stay in its range.
        """


Scale = Callable[[list[Tensor], Tensor, Tensor | None, bool], list[Tensor]]

STARTERS: dict[str, tuple[Starter, Scale]] = {}
"""Backend -> (function that starts a job, its `scale`)."""


def start(
    options: Options,
    vocabulary: int,
    dtype: torch.dtype,
    shift: int = 0,
    upstream: Upstream | None = None,
    narrow: bool = False,
) -> Job:
    """Start a job on the backend that the options name; KeyError if it is not registered."""
    return STARTERS[options.kernel][0](options, vocabulary, dtype, shift, upstream, narrow)


def scale(kernel: str, grads: list[Tensor], upstream: Tensor, deferred: Tensor | None, inplace: bool) -> list[Tensor]:
    """Return gradients times 0-d factors, rounded once; with `inplace` overwrite them."""
    return STARTERS[kernel][1](grads, upstream, deferred, inplace)
