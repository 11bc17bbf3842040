"""The arguments of a divergence in the PyTorch driver, and their form as arguments of a custom operation."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.facts import accumulation_dtype
from xent.backends.torch.options import as_tensor
from xent.core.validate_divergence import check_beta, check_temperature
from xent.core.validate_options import check_numbers

__all__ = ["SCHEMA", "Divergence", "pack", "reduction_of", "unpack"]

SCHEMA = (
    "Tensor student, Tensor? weight, Tensor? bias, Tensor teacher, Tensor? teacher_weight, Tensor? teacher_bias, "
    "Tensor? sample_weight, Tensor? normalizer, Tensor numbers, bool[] needs, bool[] has, str tail, str reduction, "
    "int? workspace, ScalarType compute, bool entropy, str kernel"
)
"""`numbers`: beta; softcap and scale of the student, then of the teacher; the temperature; the normalizer.
`has`: whether the two softcaps and the normalizer are given."""


class Divergence(NamedTuple):
    """The arguments of a divergence. Classes are on the last axis."""

    student: Tensor
    """Logits (..., V), or with a `weight` hidden states (..., D)."""
    weight: Tensor | None
    bias: Tensor | None
    teacher: Tensor
    """Logits (..., V); with a `teacher_weight` hidden states (..., D'); with a `tail` ids (..., K)."""
    teacher_weight: Tensor | None
    """(V, D'); with a `tail` log-probabilities (..., K)."""
    teacher_bias: Tensor | None
    sample_weight: Tensor | None
    normalizer: Tensor | float | None
    beta: float
    softcap: float | None
    logit_scale: float
    teacher_softcap: float | None
    teacher_scale: float
    temperature: float
    """Already included in the softcaps and scales; stored only to be checked."""
    needs: tuple[bool, bool, bool]
    """Whether gradients of student, weight and bias are needed."""
    tail: str
    """How a top-k teacher's mass on other classes is treated; "" for other teachers."""
    reduction: str
    workspace: int | None
    compute: torch.dtype
    """The dtype of the student's logits, or of the matrix products of its gradients."""
    entropy: bool
    """Whether the student's entropy is returned."""
    kernel: str
    """The backend whose steps are used."""

    @property
    def rows(self) -> torch.Size:
        """The shape of a per-row loss."""
        return self.student.shape[:-1]

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.student.shape[-1] if self.weight is None else self.weight.shape[0]

    @property
    def accumulation(self) -> torch.dtype:
        """The dtype of sums, of exact logits and of the loss."""
        return accumulation_dtype(self.compute)

    @property
    def makes_gradient_first(self) -> bool:
        """Whether the forward pass computes the gradient. Not for float16 logits, where it could underflow."""
        return self.reduction != "none" and (self.weight is not None or self.compute != torch.float16)


def pack(call: Divergence) -> tuple[Any, ...]:
    """Return the arguments of `SCHEMA`."""
    is_tensor = isinstance(call.normalizer, Tensor)
    has_divisor = call.normalizer is not None and not is_tensor
    numbers = [
        call.beta,
        0.0 if call.softcap is None else call.softcap,
        call.logit_scale,
        0.0 if call.teacher_softcap is None else call.teacher_softcap,
        call.teacher_scale,
        call.temperature,
        call.normalizer if has_divisor else 0.0,
    ]
    return (
        *call[:7],
        call.normalizer if is_tensor else None,
        as_tensor(numbers),
        list(call.needs),
        [call.softcap is not None, call.teacher_softcap is not None, has_divisor],
        *call[15:],
    )


def unpack(arguments: Any) -> Divergence:
    """Return the call for `SCHEMA`'s arguments. Numbers of compiled calls are validated here for the first time."""
    tensors, (normalizer, numbers, needs, has, *rest) = arguments[:7], arguments[7:]
    tail, reduction, workspace, compute, entropy, kernel = rest
    beta, softcap, scale, teacher_softcap, teacher_scale, temperature, divisor = numbers.tolist()
    check_beta(beta)
    check_temperature(temperature)
    if tail and beta != 0:
        raise ValueError(f"beta must be 0 with a TopKTeacher, got {beta}")
    caps = [cap if given else None for cap, given in zip((softcap, teacher_softcap), has, strict=False)]
    check_numbers(0.0, 0.0, caps[0], scale, divisor if has[2] else None)
    check_numbers(0.0, 0.0, caps[1], teacher_scale, None)
    values: tuple[Any, ...] = (
        *tensors,
        divisor if has[2] else normalizer,
        beta,
        caps[0],
        scale,
        caps[1],
        teacher_scale,
        temperature,
        tuple(needs),
        tail,
        reduction,
        workspace,
        compute,
        entropy,
        kernel,
    )
    return Divergence(*values)


def reduction_of(arguments: Any) -> str:
    """Return the reduction in `SCHEMA`'s arguments."""
    return str(arguments[12])
