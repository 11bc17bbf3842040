"""The options of a call, and their form as arguments of custom operations: tensors, one tensor of numbers, constants.

Numbers are passed to operations in one float64 tensor on the CPU. As Python floats they would be constants of a
compiled graph, and a z-loss or smoothing that changes during training would cause recompilations.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.devices import looks_at_targets
from xent.core.spec import LossSpec, bounded
from xent.core.validate_options import check_numbers

__all__ = [
    "ARGUMENTS",
    "SCHEMA",
    "TENSORS",
    "Options",
    "accuracy_is_per_row",
    "as_tensor",
    "pack",
    "read",
    "reduction_of",
    "stats_of",
    "unpack",
    "without_tensors",
]

SCHEMA = (
    "Tensor target, Tensor? weight, Tensor? sample_weight, Tensor? normalizer, Tensor? temperature, "
    "Tensor? support_ids, Tensor? support_offsets, Tensor? logit_scale, Tensor? softcap, Tensor numbers, "
    "int ignore_index, bool has_softcap, bool has_divisor, str reduction, str[] stats, bool exact, "
    "bool accuracy_of_rows, str kernel"
)
ARGUMENTS = 18  # number of arguments of `SCHEMA`
TENSORS = 10  # number of tensor arguments, the first ones of `SCHEMA`


class Options(NamedTuple):
    """The arguments of a call other than its logits, or its hidden states and classifier."""

    target: Tensor
    weight: Tensor | None
    sample_weight: Tensor | None
    normalizer: Tensor | float | None
    temperature: Tensor | None
    """The target's shape. Divides the logits of each row after scale and softcap."""
    support_ids: Tensor | None
    support_offsets: Tensor | None
    logit_scale: Tensor | None
    """0-d tensor, or None; the spec's number is NaN if it is given."""
    softcap: Tensor | None
    """Likewise."""
    spec: LossSpec
    kernel: str
    """The backend whose steps are used."""

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The fields before `spec`; `normalizer` may be a number."""
        return self[:-2]


def without_tensors(spec: LossSpec, logit_scale: Tensor | None, softcap: Tensor | None) -> LossSpec:
    """Return the options with NaN for those numbers that are passed as tensors."""
    if logit_scale is None and softcap is None:
        return spec
    scale = spec.logit_scale if logit_scale is None else math.nan
    return replace(spec, logit_scale=scale, softcap=spec.softcap if softcap is None else math.nan)


def read(options: Options, always: bool = False) -> Options:
    """Replace 0-d tensors by validated numbers. With `always`, also those whose reading synchronises with a device."""
    spec, scale, cap = options.spec, options.logit_scale, options.softcap
    if scale is None and cap is None:
        return options
    if scale is not None and (always or looks_at_targets(scale.device)):
        spec, scale = replace(spec, logit_scale=float(scale)), None
        check_numbers(0.0, 0.0, None, spec.logit_scale, None)
    if cap is not None and (always or looks_at_targets(cap.device)):
        check_numbers(0.0, 0.0, float(cap), 1.0, None)
        spec, cap = replace(spec, softcap=bounded(float(cap))), None
    return options._replace(spec=spec, logit_scale=scale, softcap=cap)


def pack(options: Options) -> tuple[Any, ...]:
    """Return the arguments of `SCHEMA`."""
    target, weight, sample_weight, normalizer, *sampling, scale, cap, spec, kernel = options
    is_tensor = isinstance(normalizer, Tensor)
    numbers = [
        spec.label_smoothing,
        spec.z_loss,
        1.0 if spec.softcap is None or cap is not None else spec.softcap,
        1.0 if scale is not None else spec.logit_scale,
        0.0 if normalizer is None or is_tensor else normalizer,
    ]
    return (
        target,
        weight,
        sample_weight,
        normalizer if is_tensor else None,
        *sampling,
        scale,
        cap,
        as_tensor(numbers),
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
    """Return the options for `SCHEMA`'s arguments. Numbers of compiled calls are validated here for the first time."""
    target, weight, sample_weight, normalizer, *sampling, scale, cap_tensor = arguments[: TENSORS - 1]
    numbers, ignore_index, has_softcap, has_divisor, reduction, stats, exact, accuracy_of_rows, kernel = arguments[
        TENSORS - 1 :
    ]
    label_smoothing, z_loss, softcap, logit_scale, divisor = numbers.tolist()
    cap = bounded(softcap) if has_softcap else None
    check_numbers(label_smoothing, z_loss, cap, logit_scale, divisor if has_divisor else None)
    spec = LossSpec(
        reduction, ignore_index, label_smoothing, z_loss, cap, logit_scale, tuple(stats), exact, accuracy_of_rows
    )
    temperature, ids, offsets = sampling
    divided, spec = divisor if has_divisor else normalizer, without_tensors(spec, scale, cap_tensor)
    tensors = (target, weight, sample_weight, divided, temperature, ids, offsets, scale, cap_tensor)
    return read(Options(*tensors, spec, kernel))


def reduction_of(arguments: Any) -> str:
    """Return the reduction in `SCHEMA`'s arguments, without reading the numbers."""
    return str(arguments[13])


def stats_of(arguments: Any) -> list[str]:
    """Return the names of the statistics in `SCHEMA`'s arguments."""
    return list(arguments[14])


def accuracy_is_per_row(arguments: Any) -> bool:
    """Return whether the accuracy is returned per row."""
    return bool(arguments[16])


def as_tensor(numbers: list[Any]) -> Tensor:
    """Return numbers as one float64 tensor on the CPU."""
    if torch.compiler.is_compiling():
        # A multiplication keeps a symbolic float symbolic; torch.tensor would turn it into a constant of the graph.
        return torch.stack([torch.ones((), dtype=torch.float64, device="cpu") * number for number in numbers])
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
