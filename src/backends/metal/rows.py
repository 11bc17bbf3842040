"""Launch the Metal kernels for a block of MLX logits: template arguments, threads, arrays, and trials of kernels.

The largest number of threads of a pipeline depends on its registers, which Apple's compiler chooses. MLX does not
report it: a launch with more threads fails when the graph is evaluated, in an unrelated line of the program, and so
does a source that does not compile. Therefore each kernel is launched once, with one threadgroup and at most 8 elements
per axis, and evaluated at once, before a launch is part of a graph.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from xent.backends.metal.sources import (
    FORWARD_OUTPUTS,
    KernelError,
    backward_kernel,
    fitting,
    forward_kernel,
    threads_and_held,
    warn_once,
)
from xent.backends.mlx import plain
from xent.backends.mlx.facts import gather_facts
from xent.backends.mlx.kernels import KERNELS, Kernels, Results, RowFacts
from xent.backends.mlx.prepare import prepare
from xent.core.call import Call, Classes, Given

__all__ = ["Launch", "backward", "forward", "kernels_that_ran", "problem"]

_SMALL = 8  # elements: MLX passes smaller arrays in constant memory, but the kernels expect device memory
_tried: dict[Any, "bool | KernelError"] = {}


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch over R rows, with one threadgroup per row."""

    kernel: Callable[..., list[mx.array]]
    name: str
    inputs: list[mx.array]
    template: list[tuple[str, Any]]
    shapes: list[tuple[int, ...]]
    dtypes: list[mx.Dtype]

    def run(self, rows: int, threads: int) -> list[mx.array]:
        """Return the outputs, not yet evaluated."""
        return self.kernel(
            inputs=self.inputs,
            template=self.template,
            output_shapes=self.shapes,
            output_dtypes=self.dtypes,
            grid=(threads, rows, 1),
            threadgroup=(threads, 1, 1),
        )

    def allows(self, threads: int) -> bool:
        """Whether the kernel can run with this number of threads; KernelError if it cannot run with any number."""
        inputs = tuple((_small(array.shape), array.dtype) for array in self.inputs)
        key = (self.name, tuple(self.template), inputs, threads)
        if key not in _tried:
            _tried[key] = self._trial(inputs, threads)
        found = _tried[key]
        if isinstance(found, KernelError):
            raise found
        return found

    def _trial(self, inputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...], threads: int) -> "bool | KernelError":
        zeros = [mx.zeros(shape, dtype) for shape, dtype in inputs]
        trial = Launch(self.kernel, self.name, zeros, self.template, list(map(_small, self.shapes)), self.dtypes)
        try:
            mx.eval(trial.run(1, threads))
        except (RuntimeError, ValueError) as error:
            # MLX says "Thread group size (512) is greater than the maximum allowed threads per threadgroup (384)."
            return False if "thread group size" in str(error).lower() else KernelError(str(error))
        return True


def kernels_that_ran() -> set[str]:
    """Return the names of the kernels that have run in this process, each with the limits of its pipelines."""
    return {f"{name} with {threads} threads" for (name, _, _, threads), ran in _tried.items() if ran is True}


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(size, _SMALL) for size in shape)


def forward(logits: mx.array, facts: RowFacts, asked: Collection[str]) -> Results:
    """Compute a block: see `xent.backends.mlx.kernels.Kernels.forward`."""
    count, vocabulary = logits.shape
    try:
        launch, limit = fitting(lambda limit: _forward_launch(logits, facts, asked, limit), Launch.allows)
    except KernelError as error:
        warn_once(error, "MLX")
        return plain.forward(logits, facts, asked)
    made = launch.run(count, threads_and_held(vocabulary, logits.dtype.size, limit)[0])
    named = zip(FORWARD_OUTPUTS, made, _wanted(asked), strict=True)
    return {name: array for name, array, wanted in named if wanted}


def backward(logits: mx.array, facts: RowFacts, norm: mx.array) -> mx.array:
    """Return the gradient of a block: see `xent.backends.mlx.kernels.Kernels.backward`."""
    inputs = [*_inputs(logits, facts), norm, _upstream(facts) if facts.upstream else facts.numbers]
    template = [*_template(logits, facts), ("UPSTREAM", bool(facts.upstream))]
    launch = Launch(backward_kernel(), "backward", inputs, template, [logits.shape], [logits.dtype])
    try:
        launch, limit = fitting(lambda limit: launch, Launch.allows)
    except KernelError as error:
        warn_once(error, "MLX")
        return plain.backward(logits, facts, norm)
    return launch.run(len(logits), threads_and_held(logits.shape[1], logits.dtype.size, limit)[0])[0]


KERNELS["metal"] = Kernels(forward, backward)


@cache
def problem(dtype: mx.Dtype) -> str | None:
    """Return why the kernel of a plain loss with gradient cannot run on this GPU, and warn; None if it can run."""
    logits, asked = mx.zeros((8, 8), dtype), {"loss", "norm", "grad"}
    call = Call(Given(logits, 1), Classes(mx.zeros((8,), mx.int32)))
    facts = gather_facts(prepare(call)).rows
    try:
        fitting(lambda limit: _forward_launch(logits, facts, asked, limit), Launch.allows)
    except KernelError as error:
        warn_once(error, "MLX")
        return str(error)
    return None


def _wanted(asked: Collection[str]) -> tuple[bool, ...]:
    """Return which of `FORWARD_OUTPUTS` are requested."""
    return tuple(name in asked for name in FORWARD_OUTPUTS)


def _forward_launch(logits: mx.array, facts: RowFacts, asked: Collection[str], limit: int) -> Launch:
    count, vocabulary = logits.shape
    _, held = threads_and_held(vocabulary, logits.dtype.size, limit)
    template = [
        *_template(logits, facts),
        ("ENTROPY", "entropy" in asked),
        ("NLL", "nll" in asked),
        ("PREDICTIONS", "predictions" in asked),
        ("SQUARES", "log_sum_sq_probs" in asked),
        ("LEVEL", "mean_logit" in asked),
        ("NORM", "norm" in asked),
        ("GRAD", "grad" in asked),
        ("SKIPS_DEAD", "dead" not in asked),
        ("HELD", held if "grad" in asked else 1),
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
    if logits.size < _SMALL:
        logits = mx.pad(logits, [(0, _SMALL), (0, 0)])
    optional = (facts.target, facts.target_logits, facts.probabilities, facts.class_weight, facts.bend)
    return [
        logits,
        facts.numbers,
        *(facts.numbers if array is None else array for array in optional),
        facts.weight,
        facts.scale,
        facts.dead,
    ]
