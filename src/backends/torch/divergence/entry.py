"""The entry of a divergence: autocast, which gradients are needed, and results in the caller's shapes."""

import torch
from torch import Tensor

from xent.backends.torch import private
from xent.backends.torch.autograd import asks_for_gradient
from xent.backends.torch.divergence import ops as _ops  # noqa: F401  registers the operations
from xent.backends.torch.divergence.autograd import DivergenceFunction
from xent.backends.torch.divergence.call import Divergence, pack
from xent.backends.torch.linear_call import compute_dtype
from xent.backends.torch.transforms import NO_TEACHER_GRADIENT, refuse_gradients, refuse_transforms
from xent.core.spec import Stats
from xent.core.teachers import DivergenceCall, LinearLogits, StoredLogits, TopKTeacher

__all__ = ["run"]


def run(call: DivergenceCall, kernel: str) -> tuple[Tensor, Stats]:
    """Run a validated call with the steps of that backend."""
    named = _constants(call)
    # The teacher's classifier may be a parameter that requires a gradient, which is ignored; nothing else may.
    computed = {name: value for name, value in named.items() if name not in ("teacher.weight", "teacher.bias")}
    refuse_gradients(computed, NO_TEACHER_GRADIENT)
    refuse_transforms(named)
    arguments = _arguments(call, kernel)
    refuse_transforms(
        {
            name: tensor
            for name, tensor in zip(("student", "linear_weight", "linear_bias"), arguments[:3], strict=True)
            if tensor is not None
        }
    )
    packed = pack(arguments)
    if torch.compiler.is_compiling() and private.transforms_active():
        from xent.backends.torch.divergence import compiled

        loss, *_, entropy = compiled.divergence(*packed)
    elif any(arguments.needs):
        loss, *_, entropy = DivergenceFunction.apply(*packed)
    else:
        loss, *_, entropy = torch.ops.xent.divergence(*packed)
    stats = Stats(entropy=entropy.view(call.rows) if call.stats else None)
    return loss.view(call.rows) if call.reduction == "none" else loss, stats


def _constants(call: DivergenceCall) -> dict[str, Tensor]:
    """Return the tensors that get no gradient, by the caller's names of them."""
    found = {"sample_weight": call.sample_weight, "normalizer": call.normalizer}
    teacher = call.teacher
    if isinstance(teacher, StoredLogits):
        found["teacher"] = teacher.logits
    elif isinstance(teacher, TopKTeacher):
        found |= {"teacher.ids": teacher.ids, "teacher.log_probs": teacher.log_probs}
    else:
        found |= {"teacher.input": teacher.input, "teacher.weight": teacher.weight, "teacher.bias": teacher.bias}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _arguments(call: DivergenceCall, kernel: str) -> Divergence:
    student, last = call.student, len(call.rows)
    weight = bias = None
    if isinstance(student, LinearLogits):
        source, weight, bias = student.input, student.weight, student.bias
    else:
        source = student.logits if call.axis == last else student.logits.movedim(call.axis, -1)
    teacher, cap, scale, tail = call.teacher, None, 1.0, ""
    more: tuple[Tensor | None, Tensor | None] = (None, None)
    if isinstance(teacher, TopKTeacher):
        known, more, tail = teacher.ids, (teacher.log_probs, None), teacher.tail
    elif isinstance(teacher, StoredLogits):
        known = teacher.logits if call.axis == last else teacher.logits.movedim(call.axis, -1)
        scale = teacher.logit_scale
    else:
        bias_of_teacher = None if teacher.bias is None else teacher.bias.detach()
        known, more = teacher.input, (teacher.weight.detach(), bias_of_teacher)
        cap, scale = teacher.softcap, teacher.logit_scale
        compute_dtype(teacher.input, teacher.weight, teacher.bias, "teacher.")
    compute = source.dtype if weight is None else compute_dtype(source, weight, bias)
    needs = asks_for_gradient(source, weight, bias)
    return Divergence(
        source,
        weight,
        bias,
        known,
        *more,
        call.sample_weight,
        call.normalizer,
        call.beta,
        student.softcap,
        student.logit_scale,
        cap,
        scale,
        call.temperature,
        (needs[0], needs[1], needs[2]),
        tail,
        call.reduction,
        call.workspace,
        compute,
        "entropy" in call.stats,
        kernel,
    )
