"""The rows of one call, and the steps that a backend of the PyTorch driver implements.

The driver knows matrix products, chunks and autograd. Everything that happens to a row between its logits and its loss
is a job's: a backend registers what starts one (`STARTERS`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.torch.schedule import Part
from xent.core.spec import LossSpec

__all__ = ["STARTERS", "Job", "Starter", "Taken", "Upstream", "scale", "start"]


class Taken(NamedTuple):
    """A part's hidden states in the compute dtype, (R, D)."""

    hidden: Tensor
    trained: Tensor
    """The same, and 0 in rows without a gradient, so that nothing of theirs, not even NaN, reaches the classifier's."""
    target_logits: Tensor | None
    """(R,) float32; None for class probabilities, and where the compute dtype rounds no more than that."""


class Upstream(NamedTuple):
    """The gradients that came back to a call, (N,) each; None for what nobody used, which then costs nothing."""

    loss: Tensor | None = None
    """Of the rows' losses; 0-d for a reduced loss."""
    lse: Tensor | None = None
    nll: Tensor | None = None
    entropy: Tensor | None = None

    @staticmethod
    def of(names: tuple[str, ...], loss: Tensor | None, stats: Any) -> "Upstream":
        """Return the gradients of a loss and of the statistics of these names."""
        given = {name: grad for name, grad in zip(names, stats, strict=True) if grad is not None}
        return Upstream(loss, **given)


class Job(Protocol):
    """N rows. They are taken in any order, in whole or in parts, and then `finish` says what came of them."""

    spec: LossSpec
    count: int
    deferred: Tensor | None
    """0-d factor that the gradients of a `narrow` job still lack."""

    def partition(self, several: bool) -> tuple[Tensor | None, int | Tensor]:
        """Put the rows that have to be computed first.

        Returns the order (N,) int64, None where it is the call's, and their number: 0-d int64 where the host cannot see
        it without waiting. `several`: whether leaving rows out can save anything where that is so.
        """

    def learn(self, number: int) -> None:
        """Be told the number of `partition` where it was a tensor. If it is `count`, the order is the call's again."""

    def logits(self, logits: Tensor, grad: Tensor | None, norm: Tensor | None) -> None:
        """Fold and finish all rows of (..., V) logits of any strides; write the gradient of the reduced loss to `grad`.

        `grad` may be `logits`. `norm` (3, N) is filled with what `gradient` needs.
        """

    def gradient(self, logits: Tensor, grad: Tensor, norm: Tensor | None, entropy: Tensor | None) -> None:
        """Write the gradient of all rows; `norm` as `logits` left it.

        `entropy` (N,), as the forward pass found it, is there where one of the upstream gradients is the entropy's.
        """

    def take(self, linear: Linear, part: Part) -> Taken:
        """Return the hidden states of a part and its target logits."""

    def chunk(self, logits: Tensor, part: Part, grad: Tensor | None, target_logits: Tensor | None) -> None:
        """Do with a part's logits (R, V) what `logits` does with all; `target_logits` replace those of the targets."""

    def tiles(self, linear: Linear, norm: Tensor | None) -> bool:
        """Fold and finish all rows without their logits ever being there; False where the backend cannot.

        `norm`, as `new_norm` returned it, is filled with what `multiply` needs.
        """

    def new_norm(self, linear: Linear) -> Tensor | None:
        """Return memory for what `multiply` needs of all rows; None where `multiply` does not serve the call."""

    def multiply(
        self, linear: Linear, taken: Taken, part: Part, grad: Tensor, norm: Tensor, entropy: Tensor | None
    ) -> None:
        """Write the gradient (R, columns) of a part's logits without storing logits; 0 beyond the vocabulary."""

    def finish(self) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, reduced, and the statistics in the spec's order, per-row ones flat."""


class Starter(Protocol):
    """What a backend registers."""

    def __call__(
        self, options: Options, vocabulary: int, dtype: torch.dtype, shift: int, upstream: Upstream | None, narrow: bool
    ) -> Job:
        """Start a job on logits of `dtype`.

        Row t of a sequence has the target of row t + shift. `upstream`: gradients are for these, rather than for a
        reduced loss. `narrow`: gradients pass through float16, and are kept in its range.
        """


STARTERS: dict[str, tuple[Starter, Callable[[Tensor, Tensor, Tensor | None, bool], Tensor]]] = {}
"""By backend: what starts a job, and `scale`."""


def start(
    options: Options,
    vocabulary: int,
    dtype: torch.dtype,
    shift: int = 0,
    upstream: Upstream | None = None,
    narrow: bool = False,
) -> Job:
    """Start a job on the backend that the options name; KeyError for one that registered nothing."""
    return STARTERS[options.kernel][0](options, vocabulary, dtype, shift, upstream, narrow)


def scale(kernel: str, grad: Tensor, upstream: Tensor, deferred: Tensor | None, inplace: bool) -> Tensor:
    """Return a gradient times 0-d factors, rounded once; with `inplace` in its own memory."""
    return STARTERS[kernel][1](grad, upstream, deferred, inplace)
