"""What a backend registers for divergences: the steps of a block of rows whose logits are there."""

from typing import Protocol

from torch import Tensor

from xent.backends.torch.divergence.call import Divergence
from xent.backends.torch.divergence.facts import RowFacts, TopK
from xent.backends.torch.divergence.plain import plain_rows

__all__ = ["STEPS", "Steps"]


class Steps(Protocol):
    """Takes a block of rows."""

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
        """Write the weighted losses (R,) to `loss` and the gradient with respect to `z` to `grad`, where asked.

        `entropy` (R,), where asked, gets the student's, 0 in dead rows.

        `z` (R, V) are the student's raw logits and `teacher` (R, V) those of the teacher, both with contiguous rows, in
        any float dtypes. `loss` and `entropy` have the accumulation dtype. `grad` (R, V), with contiguous rows, may be
        `z` itself.
        """


STEPS: dict[str, Steps] = {"torch": plain_rows, "metal": plain_rows}
"""By backend. Metal has no kernels for divergences: PyTorch's own operations serve them there."""
