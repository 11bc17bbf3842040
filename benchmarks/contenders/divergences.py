"""Divergence from a teacher: xent, TRL's kernels, Liger-Kernel, and both sides' logits in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case, Function
from benchmarks.contenders.entry import Absent, Contender, LossFunction
from benchmarks.contenders.fused import find_peer, refuse_cpu

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CONTENDERS"]

_FUNCTION: Function = "linear divergence"


def _ours(case: Case) -> LossFunction:
    import xent

    options = dict(case.options)
    stored = options.pop("top_k", None) is not None

    def loss(input: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Any:
        teacher = xent.TopKTeacher(first, second) if stored else xent.LinearTeacher(first, second)
        return xent.linear_divergence(input, weight, teacher, **options)

    return loss


def _needs_hidden_states(case: Case, name: str) -> None:
    if "top_k" in dict(case.options):
        raise Absent(f"{name} takes no stored classes")


def _trl(case: Case) -> LossFunction:
    _needs_hidden_states(case, "TRL")
    function: Any = find_peer("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction")
    refuse_cpu(case, "TRL's tile kernel")
    beta = dict(case.options).get("beta", 0.0)

    def loss(input: Tensor, weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor) -> Any:
        return function.apply(input, weight, None, teacher_input, teacher_weight, None, beta)[0].mean()

    return loss


def _liger(case: Case) -> LossFunction:
    _needs_hidden_states(case, "Liger-Kernel")
    function = find_peer("liger_kernel.transformers.functional", "liger_fused_linear_jsd")
    refuse_cpu(case, "Liger-Kernel")
    beta = dict(case.options).get("beta", 0.0)

    def loss(input: Tensor, weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor) -> Any:
        return function(input, weight, teacher_input, teacher_weight, jsd_beta=beta)

    return loss


def _unfused(case: Case) -> LossFunction:
    """Return the usual PyTorch code: logits in the case's dtype, float32 from the softmax on."""
    from benchmarks.gpu.definitions import divergence_of, top_k_divergence

    options = dict(case.options)

    def loss(input: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Any:
        logits = (input @ weight.T).float()
        if "top_k" in options:
            return top_k_divergence(logits, first, second).mean()
        return divergence_of(logits, (first @ second.T).float(), options).mean()

    return loss


CONTENDERS: tuple[Contender, ...] = (
    Contender("xent", _FUNCTION, _ours, kind="ours"),
    Contender("TRL", _FUNCTION, _trl),
    Contender("Liger", _FUNCTION, _liger),
    Contender("torch fp32 logits", _FUNCTION, _unfused, holds_logits=True),
)
