"""What the PyTorch driver takes from a device's kernels, and where it finds them, by backend name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xent.backends.protocol import RowKernel
from xent.backends.torch.facts import Facts
from xent.backends.torch.results import Results

__all__ = ["Kernels", "kernels"]


@dataclass(frozen=True)
class Kernels:
    """The row kernel, and the steps around it. The functions of backend "torch" say what each does."""

    row_pass: RowKernel
    gather_facts: Callable[..., Facts]
    reduced: Callable[[Tensor, Facts], Tensor]
    target_logits: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    scale_: Callable[[Tensor, Tensor, Tensor], None]
    tile_pass: Callable[[Facts, Results, Tensor], Any] | None = None
    """Starts a forward pass over tiles of classes, from the target logits; None where a device has no kernel for it.

    What it returns has `multiply`, which takes all tiles at once or returns False, `add` for one, and `finish`.
    """
    add_product: Callable[[Tensor, Tensor, Tensor], bool] | None = None
    """Adds (M, R) @ (R, D) to a sum (M, D) in place, or returns False; None where PyTorch always does it."""


def kernels(name: str) -> Kernels:
    """Return the kernels of that backend."""
    if name == "triton":
        from xent.backends.triton.kernels import KERNELS
    else:
        from xent.backends.torch.plain_kernels import KERNELS
    return KERNELS
