"""The options of a call, and the form in which custom operations take them: tensors, one tensor of numbers, constants.

Numbers travel to operations in one float64 tensor on the CPU. As Python floats they would be constants of a compiled
graph, and a z-loss or smoothing that changes during training would recompile it at every change.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.core.spec import LossSpec
from xent.core.validate import check_numbers

__all__ = [
    "ARGUMENTS",
    "SCHEMA",
    "TENSORS",
    "Options",
    "accuracy_is_per_row",
    "pack",
    "reduction_of",
    "stats_of",
    "unpack",
]

SCHEMA = (
    "Tensor target, Tensor? weight, Tensor? sample_weight, Tensor? normalizer, Tensor? temperature, "
    "Tensor? support_ids, Tensor? support_offsets, Tensor numbers, int ignore_index, bool has_softcap, "
    "bool has_divisor, str reduction, str[] stats, bool exact, bool accuracy_of_rows, str kernel"
)
ARGUMENTS = 16  # of `SCHEMA`
TENSORS = 8  # the arguments of `SCHEMA` that are tensors come first


class Options(NamedTuple):
    """What a call says beside its logits, or hidden states and classifier."""

    target: Tensor
    weight: Tensor | None
    sample_weight: Tensor | None
    normalizer: Tensor | float | None
    temperature: Tensor | None
    """The target's shape: divides each row's logits after scale and softcap."""
    support_ids: Tensor | None
    support_offsets: Tensor | None
    spec: LossSpec
    kernel: str
    """The backend whose steps are used."""

    @property
    def tensors(self) -> tuple[Any, ...]:
        """All before `spec`; `normalizer` may be a number."""
        return self[:-2]


def pack(options: Options) -> tuple[Any, ...]:
    """Return the arguments of `SCHEMA`."""
    target, weight, sample_weight, normalizer, temperature, support_ids, support_offsets, spec, kernel = options
    is_tensor = isinstance(normalizer, Tensor)
    numbers = [
        spec.label_smoothing,
        spec.z_loss,
        0.0 if spec.softcap is None else spec.softcap,
        spec.logit_scale,
        0.0 if normalizer is None or is_tensor else normalizer,
    ]
    return (
        target,
        weight,
        sample_weight,
        normalizer if is_tensor else None,
        temperature,
        support_ids,
        support_offsets,
        _as_tensor(numbers),
        spec.ignore_index,
        spec.softcap is not None,
        normalizer is not None and not is_tensor,
        spec.reduction,
        list(spec.stats),
        spec.exact,
        spec.accuracy_of_rows,
        kernel,
    )


def unpack(arguments: Any) -> Options:
    """Return the options of `SCHEMA`'s arguments, the numbers of compiled calls being checked for the first time."""
    target, weight, sample_weight, normalizer, *sampling = arguments[: TENSORS - 1]
    numbers, ignore_index, has_softcap, has_divisor, reduction, stats, exact, accuracy_of_rows, kernel = arguments[
        TENSORS - 1 :
    ]
    label_smoothing, z_loss, softcap, logit_scale, divisor = numbers.tolist()
    cap = softcap if has_softcap else None
    check_numbers(label_smoothing, z_loss, cap, logit_scale, divisor if has_divisor else None)
    spec = LossSpec(
        reduction, ignore_index, label_smoothing, z_loss, cap, logit_scale, tuple(stats), exact, accuracy_of_rows
    )
    temperature, ids, offsets = sampling
    divided = divisor if has_divisor else normalizer
    return Options(target, weight, sample_weight, divided, temperature, ids, offsets, spec, kernel)


def reduction_of(arguments: Any) -> str:
    """Return the reduction that `SCHEMA`'s arguments name, without a look at the numbers."""
    return str(arguments[11])


def stats_of(arguments: Any) -> list[str]:
    """Return the statistics that `SCHEMA`'s arguments name."""
    return list(arguments[12])


def accuracy_is_per_row(arguments: Any) -> bool:
    """Return whether the accuracy is each row's."""
    return bool(arguments[14])


def _as_tensor(numbers: list[Any]) -> Tensor:
    if torch.compiler.is_compiling():
        # Of the ways to make a tensor of a symbolic float, multiplication is one that does not turn it into a constant.
        return torch.stack([torch.ones((), dtype=torch.float64, device="cpu") * number for number in numbers])
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
