"""Backends that are written for the older descriptions of a call, behind the interface of a backend.

The driver of MLX takes a `LogitsCall`, `LinearCall` or `DivergenceCall`, made here from a `Call`.
"""

from typing import Any, Protocol

from xent.backends.protocol import Harness
from xent.core import heads
from xent.core.call import (
    Activation,
    Allowed,
    Call,
    Classes,
    Dense,
    Given,
    Probabilities,
    Source,
    TopK,
    vocabulary_of,
)
from xent.core.spec import BackendInfo, LinearCall, LogitsCall, LossSpec, Stats, Support
from xent.core.teachers import DivergenceCall, LinearLogits, StoredLogits, TopKTeacher

__all__ = ["Adapted", "OlderBackend", "as_divergence_call", "as_loss_call"]


class OlderBackend(Protocol):
    """A backend with a function for losses and another one for divergences."""

    name: str
    framework: str
    native_to: tuple[str, ...]

    def missing(self) -> str | None:
        """As `xent.backends.protocol.Backend.missing`, like the functions without a docstring."""

    def info(self) -> BackendInfo: ...  # noqa: D102

    def refuse(self, call: LogitsCall | LinearCall) -> str | None: ...  # noqa: D102

    def run(self, call: LogitsCall | LinearCall) -> tuple[Any, Stats]: ...  # noqa: D102

    def refuse_divergence(self, call: DivergenceCall) -> str | None: ...  # noqa: D102

    def run_divergence(self, call: DivergenceCall) -> tuple[Any, Stats]: ...  # noqa: D102

    def harness(self, device: str | None = None) -> Harness[Any]: ...  # noqa: D102


class Adapted:
    """An older backend with the interface of `xent.backends.protocol.Backend`."""

    def __init__(self, backend: OlderBackend) -> None:
        self.backend = backend
        self.name, self.framework, self.native_to = backend.name, backend.framework, backend.native_to

    def missing(self) -> str | None:
        """Return why this machine cannot run the backend, or None."""
        return self.backend.missing()

    def info(self) -> BackendInfo:
        """Return the line of `xent.backends()`."""
        return self.backend.info()

    def refuse(self, call: Call) -> str | None:
        """Return why this call cannot be served, or None."""
        if isinstance(call.target, Dense | TopK):
            return self.backend.refuse_divergence(as_divergence_call(call))
        return self.backend.refuse(as_loss_call(call))

    def run(self, call: Call) -> tuple[Any, Stats]:
        """Return the loss and the statistics."""
        if isinstance(call.target, Dense | TopK):
            return self.backend.run_divergence(as_divergence_call(call))
        if call.options.heads is not None:
            import mlx.core as mx

            from xent.backends.mlx.checks import check_targets

            if isinstance(call.target, Classes):
                ignore, shifts = call.options.ignore_index, call.options.shift
                assert isinstance(shifts, tuple)
                check_targets(call.target.ids, vocabulary_of(call.source), ignore, min(shifts))
            return heads.run(call, self.run, mx, mx.array.astype)
        return self.backend.run(as_loss_call(call))

    def harness(self, device: str | None = None) -> Harness[Any]:
        """Return the harness of the gradient checks."""
        return self.backend.harness(device)


def as_loss_call(call: Call) -> LogitsCall | LinearCall:
    """Return the older description of a loss or of log-probabilities without shards."""
    source, target, activation, options, shards = call
    assert shards is None
    assert isinstance(target, Classes | Allowed | Probabilities)
    spec = LossSpec(
        options.reduction,
        options.ignore_index,
        options.label_smoothing,
        options.z_loss,
        activation.softcap,
        activation.logit_scale,
        options.stats,
        options.exact,
        options.accuracy_of_rows,
    )
    support = Support(target.classes, _offsets(target)) if isinstance(target, Allowed) else None
    wanted = target.values if isinstance(target, Probabilities) else target.ids
    arrays = wanted, options.weight, options.sample_weight, options.normalizer
    if isinstance(source, Given):
        return LogitsCall(source.logits, *arrays, spec, source.axis, source.inplace, activation.temperature, support)
    shift = 0 if isinstance(options.shift, tuple) else options.shift
    of_product = source.input, source.weight, source.bias
    return LinearCall(*of_product, *arrays, spec, shift, source.workspace, activation.temperature, support)


def as_divergence_call(call: Call) -> DivergenceCall:
    """Return the older description of a divergence. Its temperature is folded in, and no longer known."""
    source, target, options = call.source, call.target, call.options
    assert isinstance(target, Dense | TopK)
    if isinstance(source, Given):
        axis, shape = source.axis, tuple(source.logits.shape)
        rows, workspace = shape[:axis] + shape[axis + 1 :], None
    else:
        rows, workspace = tuple(source.input.shape[:-1]), source.workspace
        axis = len(rows)
    if isinstance(target, TopK):
        teacher: Any = TopKTeacher(*target)
    else:
        teacher = _logits(target.source, target.activation)
    return DivergenceCall(
        _logits(source, call.activation),
        teacher,
        _moved(options.sample_weight, options.shift, rows),
        options.normalizer,
        options.beta,
        options.reduction,
        rows,
        vocabulary_of(source),
        axis=axis,
        workspace=workspace,
        stats=options.stats,
    )


def _logits(source: Source, activation: Activation) -> StoredLogits | LinearLogits:
    """Return logits with their scale and softcap."""
    numbers = activation.softcap, activation.logit_scale
    if isinstance(source, Given):
        return StoredLogits(source.logits, *numbers)
    return LinearLogits(source.input, source.weight, source.bias, *numbers)


def _offsets(target: Allowed) -> Any:
    """Return the offsets (N + 1,) of a support."""
    import mlx.core as mx

    begin, end = target.begin, target.end
    return mx.concatenate([begin[:1], end]) if end.shape[0] else mx.zeros(1, dtype=end.dtype)


def _moved(weight: Any, shift: Any, rows: tuple[int, ...]) -> Any:
    """Return the sample weight t + shift of each row t, and 0 past the end; None for 1 each."""
    if not shift:
        return weight
    import mlx.core as mx

    weight = mx.ones(rows) if weight is None else weight
    kept = weight[..., shift:]
    return mx.concatenate([kept, mx.zeros_like(weight[..., : rows[-1] - kept.shape[-1]])], -1)
