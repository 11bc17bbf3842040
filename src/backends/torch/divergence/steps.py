"""The function that a backend registers for divergences: it computes a block of rows from logits of both sides."""

from typing import Protocol

from torch import Tensor

from xent.backends.torch.divergence.call import Divergence
from xent.backends.torch.divergence.facts import RowFacts, TopK
from xent.backends.torch.divergence.plain import plain_rows

__all__ = ["OVERLAYS", "STEPS", "Steps"]


class Steps(Protocol):
    """Computes a block of rows."""

    def __call__(
        self,
        call: Divergence,
        z: Tensor,
        teacher: Tensor | TopK,
        facts: RowFacts,
        loss: Tensor,
        grad: Tensor | None,
        entropy: Tensor | None,
    ) -> None:
        """Write the weighted losses (R,) to `loss`, and if not None the gradient to `grad` and entropies to `entropy`.

        `z` (R, V) are the student's raw logits and `teacher` (R, V) those of the teacher, both with contiguous rows and
        of any float dtypes. If `call` has a classifier, `z` may be overwritten. `loss` and `entropy` (R,) have the
        accumulation dtype; the student's entropy is 0 in idle rows. `grad` (R, V), with contiguous rows, is the
        gradient with respect to `z`, and may be `z` itself. If the backend is in `OVERLAYS`, a row of a 16-bit `grad`
        may be the second half of the same row of a float32 `z`.
        """


STEPS: dict[str, Steps] = {"torch": plain_rows, "metal": plain_rows}
"""Backend -> its steps. Metal has no kernels for divergences and uses PyTorch's own operations."""

OVERLAYS: set[str] = set()
"""Backends whose steps can write a 16-bit gradient over float32 logits."""
