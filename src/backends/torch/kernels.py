"""What the PyTorch driver takes from a device's kernels, and where it finds them, by backend name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from xent.backends.protocol import RowKernel
from xent.backends.torch.facts import Facts
from xent.backends.torch.results import Results

__all__ = ["Exponentials", "Factors", "Kernels", "Piece", "joined", "kernels"]

Piece = tuple[int, Tensor, Tensor]
"""The first class, the classifier's rows (C, D) from there, and memory for what is made of their logits, (R, C)."""


@dataclass(frozen=True, eq=False)
class Factors:
    """What the gradients of R rows lack where exponentials stand for those of logits, both (R,) float32."""

    scale: Tensor
    at_target: Tensor
    """The gradient of the target's logit where that has no place among the exponentials, 0 where it has."""

    def between(self, start: int, stop: int) -> "Factors":
        """Return those of rows [start, stop) alone, in the same memory."""
        return Factors(self.scale[start:stop], self.at_target[start:stop])


def joined(parts: list[Factors]) -> Factors:
    """Return the factors of all rows of the parts."""
    return Factors(torch.cat([part.scale for part in parts]), torch.cat([part.at_target for part in parts]))


class Exponentials(Protocol):
    """Makes, for the rows of one call, the gradients of logits but for a factor a row: exponentials, and rare targets.

    `xent.backends.triton.exponentials` has the formulas.
    """

    def make(
        self, hidden: Tensor, pieces: Sequence[Piece], facts: Facts, results: Results, target_logits: Tensor
    ) -> Factors:
        """Write them for hidden (R, D) and all classes, which the pieces have in turn; fill the results.

        Facts, results and target logits are those of the R rows alone.
        """

    def make_again(
        self, hidden: Tensor, pieces: Sequence[Piece], facts: Facts, norm: Tensor, target_logits: Tensor
    ) -> Factors:
        """Write them where the norm (2, R) is known."""

    def scale_rows(self, hidden: Tensor, factors: Factors, out: Tensor) -> None:
        """Write hidden (R, D) times its rows' scale to `out`, which may be `hidden`: for the classifier's gradient."""

    def finish_input(
        self, product: Tensor, factors: Factors, target: Tensor, columns: slice, grad: Tensor, rows: Tensor | None
    ) -> None:
        """Write columns of the gradient of hidden states, `grad` (N, D), from the product with those of the classifier.

        The float32 product has R rows: the first of `grad`, or `rows` (R,) int64.
        """

    def add_targets(self, total: Tensor, hidden: Tensor, at_target: Tensor) -> None:
        """Add what the rare targets of the call's hidden states (N, D) are to the classifier's gradient (V, D)."""


@dataclass(frozen=True)
class Kernels:
    """The row kernel, and the steps around it. The functions of backend "torch" say what each does."""

    row_pass: RowKernel
    gather_facts: Callable[..., Facts]
    computed_first: Callable[[Facts], tuple[Tensor, Tensor, Facts]]
    reduced: Callable[[Tensor, Facts], Tensor]
    target_logits: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    scale_: Callable[[Tensor, Tensor, Tensor], None]
    tile_pass: Callable[[Facts, Results, Tensor], Any] | None = None
    """Starts a forward pass over tiles of classes, from the target logits; None where a device has no kernel for it.

    What it returns has `multiply`, which takes all tiles at once or returns False, `add` for one, and `finish`.
    """
    exponentials: Callable[[Tensor, Facts], Exponentials | None] | None = None
    """Starts a call's exponentials, from the classifier (V, D) and the facts of all rows, or returns None.

    They spare a pass over the logits. None itself where a device has no kernel for it.
    """


def kernels(name: str) -> Kernels:
    """Return the kernels of that backend."""
    if name == "triton":
        from xent.backends.triton.kernels import KERNELS
    else:
        from xent.backends.torch.plain_kernels import KERNELS
    return KERNELS
