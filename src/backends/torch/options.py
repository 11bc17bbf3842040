"""The options of a call in the order in which custom operations take them: tensors, one tensor of numbers, constants.

Numbers travel in one float64 tensor on the CPU. As Python floats they would be constants of a compiled graph, and a
z-loss or smoothing that changes during training would recompile it at every change.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from xent.core.spec import LossSpec
from xent.core.validate import check_numbers

__all__ = ["SCHEMA", "Options", "pack_numbers"]

SCHEMA = (
    "Tensor target, Tensor? weight, Tensor? sample_weight, Tensor? normalizer, Tensor numbers, "
    "int ignore_index, bool has_softcap, bool has_divisor, str reduction, str[] stats, str kernel"
)


class Options(NamedTuple):
    """What `SCHEMA` says, by name."""

    target: Tensor
    weight: Tensor | None
    sample_weight: Tensor | None
    normalizer: Tensor | None
    numbers: Tensor
    ignore_index: int
    has_softcap: bool
    has_divisor: bool
    reduction: str
    stats: list[str]
    kernel: str

    def spec(self) -> LossSpec:
        """Return the options as a LossSpec, the numbers of compiled calls being checked here for the first time."""
        label_smoothing, z_loss, softcap, logit_scale, divisor = self.numbers.tolist()
        cap = softcap if self.has_softcap else None
        check_numbers(label_smoothing, z_loss, cap, logit_scale, divisor if self.has_divisor else None)
        return LossSpec(self.reduction, self.ignore_index, label_smoothing, z_loss, cap, logit_scale, tuple(self.stats))

    def divisor(self) -> float | None:
        """Return the normalizer where it was given as a number."""
        return float(self.numbers[4]) if self.has_divisor else None


def pack_numbers(spec: LossSpec, normalizer: float | None) -> Tensor:
    """Return (label_smoothing, z_loss, softcap, logit_scale, normalizer) as a float64 tensor, 0 for None."""
    numbers = [
        spec.label_smoothing,
        spec.z_loss,
        0.0 if spec.softcap is None else spec.softcap,
        spec.logit_scale,
        0.0 if normalizer is None else normalizer,
    ]
    if torch.compiler.is_compiling():
        # Of the ways to make a tensor of a symbolic float, multiplication is one that does not turn it into a constant.
        return torch.stack([torch.ones((), dtype=torch.float64, device="cpu") * number for number in numbers])
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
