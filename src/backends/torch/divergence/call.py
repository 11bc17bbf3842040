"""One divergence as the PyTorch driver runs it, and as a custom operation takes it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.core.validate import check_numbers
from xent.core.validate_divergence import check_beta, check_temperature

__all__ = ["SCHEMA", "Divergence", "pack", "reduction_of", "unpack"]

SCHEMA = (
    "Tensor student, Tensor? weight, Tensor? bias, Tensor teacher, Tensor? teacher_weight, Tensor? teacher_bias, "
    "Tensor? sample_weight, Tensor? normalizer, Tensor numbers, bool[] needs, bool[] has, str tail, str reduction, "
    "int? workspace, ScalarType compute, bool entropy, str kernel"
)
"""`numbers`: beta; softcap and scale of the student, then of the teacher; the temperature; the normalizer.
`has`: which of the softcaps and the normalizer are given."""


class Divergence(NamedTuple):
    """The arguments of a divergence; classes are on the last axis."""

    student: Tensor
    """(..., V) logits, or with a `weight` (..., D) hidden states."""
    weight: Tensor | None
    bias: Tensor | None
    teacher: Tensor
    """(..., V) logits; with a `teacher_weight` (..., D') hidden states; with a `tail` (..., K) ids."""
    teacher_weight: Tensor | None
    """(V, D'); with a `tail` (..., K) log-probabilities."""
    teacher_bias: Tensor | None
    sample_weight: Tensor | None
    normalizer: Tensor | float | None
    beta: float
    softcap: float | None
    logit_scale: float
    teacher_softcap: float | None
    teacher_scale: float
    temperature: float
    """In the softcaps and scales already; here only to be checked."""
    needs: tuple[bool, bool, bool]
    """Gradients of student, weight, bias."""
    tail: str
    """What becomes of a top-k teacher's mass that is left; "" for other teachers."""
    reduction: str
    workspace: int | None
    compute: torch.dtype
    """Of the student's logits, or of the products that its gradient passes through."""
    entropy: bool
    """Whether the student's entropy is asked for."""
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
        return torch.float64 if self.compute == torch.float64 else torch.float32

    @property
    def makes_gradient_first(self) -> bool:
        """Whether the forward pass makes the gradient. float16 logits would leave their range before a loss scale."""
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
        _as_tensor(numbers),
        list(call.needs),
        [call.softcap is not None, call.teacher_softcap is not None, has_divisor],
        *call[15:],
    )


def unpack(arguments: Any) -> Divergence:
    """Return the call of `SCHEMA`'s arguments, the numbers of compiled calls being checked for the first time."""
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
    """Return the reduction that `SCHEMA`'s arguments name."""
    return str(arguments[12])


def _as_tensor(numbers: list[Any]) -> Tensor:
    if torch.compiler.is_compiling():
        # Of the ways to make a tensor of a symbolic float, multiplication is one that does not turn it into a constant.
        return torch.stack([torch.ones((), dtype=torch.float64, device="cpu") * number for number in numbers])
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
