"""Launch the Metal kernels for a block of MLX logits: template arguments, threads, arrays."""

from functools import cache
from typing import Any

import mlx.core as mx

from xent.backends.metal.failures import KernelError, warn_once
from xent.backends.metal.limits import Launch, fitting
from xent.backends.metal.sources import FORWARD_OUTPUTS, backward_kernel, forward_kernel
from xent.backends.metal.threads import threads_and_held
from xent.backends.mlx import plain
from xent.backends.mlx.facts import gather_facts
from xent.backends.mlx.kernels import KERNELS, Asked, Found, Kernels, RowFacts
from xent.backends.mlx.prepare import prepare
from xent.core.call import Call, Classes, Given

__all__ = ["backward", "forward", "problem"]

_DEVICE_SIZE = 8  # elements; MLX passes smaller arrays in constant memory, but the kernels expect device memory


def forward(logits: mx.array, facts: RowFacts, asked: Asked) -> Found:
    """Compute a block: see `xent.backends.mlx.kernels.Kernels.forward`."""
    count, vocabulary = logits.shape
    try:
        launch, limit = fitting(lambda limit: _forward_launch(logits, facts, asked, limit))
    except KernelError as error:
        warn_once(error, "MLX")
        return plain.forward(logits, facts, asked)
    made = launch.run(count, threads_and_held(vocabulary, logits.dtype.size, limit)[0])
    named = zip(FORWARD_OUTPUTS, made, _wanted(asked), strict=True)
    return Found(**{name: array for name, array, wanted in named if wanted})


def backward(logits: mx.array, facts: RowFacts, norm: mx.array) -> mx.array:
    """Return the gradient of a block: see `xent.backends.mlx.kernels.Kernels.backward`."""
    inputs = [*_inputs(logits, facts), norm, _upstream(facts) if facts.upstream else facts.numbers]
    template = [*_template(logits, facts), ("UPSTREAM", bool(facts.upstream))]
    launch = Launch(backward_kernel(), "backward", inputs, template, [logits.shape], [logits.dtype])
    try:
        launch, limit = fitting(lambda limit: launch)
    except KernelError as error:
        warn_once(error, "MLX")
        return plain.backward(logits, facts, norm)
    return launch.run(len(logits), threads_and_held(logits.shape[1], logits.dtype.size, limit)[0])[0]


KERNELS["metal"] = Kernels(forward, backward)


@cache
def problem(dtype: mx.Dtype) -> str | None:
    """Return why the kernel of a plain loss with gradient cannot run on this GPU, and warn; None if it can run."""
    logits, asked = mx.zeros((8, 8), dtype), Asked(grad=True, norm=True)
    call = Call(Given(logits, 1), Classes(mx.zeros((8,), mx.int32)))
    facts = gather_facts(prepare(call), (8,)).rows
    try:
        fitting(lambda limit: _forward_launch(logits, facts, asked, limit))
    except KernelError as error:
        warn_once(error, "MLX")
        return str(error)
    return None


def _wanted(asked: Asked) -> tuple[bool, ...]:
    """Return which of `FORWARD_OUTPUTS` are requested."""
    return (True, *(getattr(asked, name) for name in FORWARD_OUTPUTS[1:]))


def _forward_launch(logits: mx.array, facts: RowFacts, asked: Asked, limit: int) -> Launch:
    count, vocabulary = logits.shape
    _, held = threads_and_held(vocabulary, logits.dtype.size, limit)
    template = [
        *_template(logits, facts),
        ("ENTROPY", asked.entropy),
        ("NLL", asked.nll),
        ("PREDICTIONS", asked.predictions),
        ("SQUARES", asked.log_sum_sq_probs),
        ("LEVEL", asked.mean_logit),
        ("NORM", asked.norm),
        ("GRAD", asked.grad),
        ("SKIPS_DEAD", not asked.dead),
        ("HELD", held if asked.grad else 1),
    ]
    each_row: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {
        "norm": ((count, 2), mx.float32),
        "predictions": ((count,), mx.int32),
        "grad": ((count, vocabulary), logits.dtype),
    }
    outputs = [each_row.get(name, ((count,), mx.float32)) for name in FORWARD_OUTPUTS]
    shapes = [shape if wanted else (1,) for (shape, _), wanted in zip(outputs, _wanted(asked), strict=True)]
    dtypes = [dtype for _, dtype in outputs]
    return Launch(forward_kernel(), "forward", _inputs(logits, facts), template, shapes, dtypes)


def _template(logits: mx.array, facts: RowFacts) -> list[tuple[str, Any]]:
    return [
        ("T", logits.dtype),
        ("TARGET", facts.target is not None),
        ("EXACT", facts.target_logits is not None),
        ("WEIGHTED", facts.class_weight is not None),
        ("SMOOTHED", facts.terms.smoothing),
        ("CAPPED", facts.terms.softcap),
        ("BENT", facts.bend is not None),
    ]


def _upstream(facts: RowFacts) -> mx.array:
    """Return the upstream gradients of lse, nll and entropy, and the entropy, (R, 4); 0 for those that are None."""
    nothing = mx.zeros_like(facts.scale)
    return mx.stack([facts.upstream.get(name, nothing) for name in ("lse", "nll", "entropy", "H")], axis=-1)


def _inputs(logits: mx.array, facts: RowFacts) -> list[mx.array]:
    """Return the inputs in the kernels' order. Placeholders for arguments that the call does not have are not read."""
    if logits.size < _DEVICE_SIZE:
        logits = mx.pad(logits, [(0, _DEVICE_SIZE), (0, 0)])
    optional = (facts.target, facts.target_logits, facts.probabilities, facts.class_weight, facts.bend)
    return [
        logits,
        facts.numbers,
        *(facts.numbers if array is None else array for array in optional),
        facts.weight,
        facts.scale,
        facts.dead,
    ]
