"""The entry of the PyTorch driver: autocast, which gradients are needed, and results in the caller's shapes."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import differentiated as _differentiated  # noqa: F401  registers the autograd kernels
from xent.backends.torch import eager, private, scale_gradient
from xent.backends.torch.autograd import CrossEntropy, CrossEntropyInplace, LinearCrossEntropy, asks_for_gradient
from xent.backends.torch.facts import check_targets
from xent.backends.torch.linear_call import Linear, compute_dtype
from xent.backends.torch.options import Options, pack, read, without_tensors
from xent.backends.torch.rows import overlaps
from xent.backends.torch.target_autograd import asks, with_target
from xent.backends.torch.transforms import refuse_gradients, refuse_transforms
from xent.core import heads
from xent.core.spec import ROW_STATS, LinearCall, LogitsCall, LossSpec, Stats

__all__ = ["run", "run_linear", "run_logits"]


def run(call: LogitsCall | LinearCall, kernel: str) -> tuple[Tensor, Stats]:
    """Run a validated call with the steps of that backend."""
    without_gradient = _tensors(call, "weight", "sample_weight", "normalizer", "temperature")
    support: tuple[Any, Any] = (None, None)
    if call.support is not None:
        support = call.support.ids, call.support.offsets
        without_gradient |= {"support.ids": support[0], "support.offsets": support[1]}
    if call.vocab_parallel is not None:
        without_gradient["target"] = call.target
    numbers: tuple[Any, Any] = (call.loss.logit_scale, call.loss.softcap)
    scale, cap = (value if isinstance(value, Tensor) else None for value in numbers)
    named = {name: value for name, value in (("logit_scale", scale), ("softcap", cap)) if value is not None}
    trained = "logit_scale" if call.vocab_parallel is None else ""
    refuse_gradients(without_gradient | {name: value for name, value in named.items() if name != trained})
    refuse_transforms({**without_gradient, **named, "target": call.target})
    options = Options(
        call.target,
        call.weight,
        call.sample_weight,
        call.normalizer,
        call.temperature,
        *support,
        scale,
        cap,
        without_tensors(call.loss, scale, cap),
        kernel,
    )
    if isinstance(call, LogitsCall):
        refuse_transforms({"logits": call.logits})
        quiet = _is_eager(call.logits, *options.tensors)
        if call.vocab_parallel is not None:
            return _run_logits_in_shards(call, options, quiet)
        made = run_logits(call.logits, options, call.axis, call.inplace, quiet)
    else:
        sources = _tensors(call, "input", "linear_weight", "linear_bias")
        refuse_transforms(sources)
        quiet = _is_eager(*sources.values(), *options.tensors)
        if call.heads is not None:
            if quiet and call.vocab_parallel is None and not call.target.is_floating_point():
                check_targets(options, len(call.linear_weight), min(call.heads.shift))
            return heads.run(call, partial(run, kernel=kernel), torch, Tensor.to)
        if call.vocab_parallel is not None:
            return _run_linear_in_shards(call, options, quiet)
        arguments = (call.input, call.linear_weight, call.linear_bias, options, call.shift, call.workspace)
        made = run_linear(*arguments, quiet)
    return made if call.loss.stats else (made, Stats())


def run_logits(logits: Tensor, options: Options, axis: int, inplace: bool, quiet: bool) -> Any:
    """Return the loss, or (loss, Stats) if the spec names statistics.

    `quiet`: the call is eager, with plain tensors, and no tracer, transform or mode is active.
    """
    given = logits
    logits, options = _classes_last(logits, options, axis)
    if options.logit_scale is not None and not _finds_gradients_later():
        logits, scale = scale_gradient.of_logits(logits, options.logit_scale, inplace)
        options = options._replace(logit_scale=scale)
    needs_grad = logits.requires_grad and torch.is_grad_enabled()
    if asks(options.target):
        if inplace and needs_grad:
            raise ValueError(
                "inplace=True overwrites the logits, from which the gradient of target is computed: pass "
                "inplace=False, or target.detach()"
            )
        made = run_logits(logits, _constant_target(options), logits.dim() - 1, False, quiet)
        return _with_target(made, options, logits)
    if quiet:
        options = read(options)
        if inplace and needs_grad:
            _check_inplace(given)
        loss, stats = eager.cross_entropy(private.alive(logits), options, needs_grad, inplace)
    elif _compiles_a_transform():
        from xent.backends.torch import compiled

        loss, _, *stats = compiled.cross_entropy(logits, *pack(options))
    elif not needs_grad or private.is_exporting():
        loss, _, stats = torch.ops.xent.cross_entropy(logits, False, *pack(options))
    elif inplace and not torch.compiler.is_compiling():
        _check_inplace(given)
        loss, *stats = CrossEntropyInplace.apply(logits, *pack(options))
    else:
        # A compiler plans memory itself, and could not detect that an earlier operation has saved the logits.
        loss, _, *stats = CrossEntropy.apply(logits, True, *pack(options))
    return _shaped(loss, stats, options.spec, logits.shape[:-1])


def run_linear(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    shift: int,
    workspace: int | None,
    quiet: bool,
) -> Any:
    """Return the loss, or (loss, Stats) if the spec names statistics; `quiet` as in `run_logits`."""
    compute = compute_dtype(source, weight, bias)
    if options.logit_scale is not None and not _finds_gradients_later():
        source, weight, bias, scale = scale_gradient.of_linear(source, weight, bias, options.logit_scale)
        options = options._replace(logit_scale=scale)
    needs = asks_for_gradient(source, weight, bias)
    if asks(options.target):
        made = run_linear(source, weight, bias, _constant_target(options), shift, workspace, quiet)
        return _with_target(made, options, source, weight, bias, needs, shift, workspace, compute)
    if quiet:
        options = read(options)
        source, weight = private.alive(source), private.alive(weight)
        bias = None if bias is None else private.alive(bias)
        linear = Linear(source, weight, bias, shift, workspace, compute, (needs[0], needs[1], needs[2]))
        loss, stats = eager.linear_cross_entropy(linear, options)
        return _shaped(loss, stats, options.spec, source.shape[:-1])
    arguments = (source, weight, bias, needs, shift, workspace, compute, *pack(options))
    if _compiles_a_transform():
        from xent.backends.torch import compiled

        loss, _, _, _, _, *stats = compiled.linear_cross_entropy(*arguments)
    elif any(needs) and not private.is_exporting():
        loss, _, _, _, _, *stats = LinearCrossEntropy.apply(*arguments)
    else:
        loss, _, _, stats = torch.ops.xent.linear_cross_entropy(*arguments)
    return _shaped(loss, stats, options.spec, source.shape[:-1])


def _constant_target(options: Options) -> Options:
    return options._replace(target=options.target.detach())


def _with_target(made: Any, options: Options, *sources: Any) -> Any:
    """Add the gradient of the target to results that lack it; `sources` are the first arguments of the operation."""
    spec = options.spec
    loss, stats = made if spec.stats else (made, Stats())
    loss, nll = with_target(loss, stats.nll if spec.reduction == "none" else None, *sources, *pack(options))
    if not spec.stats:
        return loss
    return loss, stats if nll is None else replace(stats, nll=nll)


def _run_logits_in_shards(call: LogitsCall, options: Options, quiet: bool) -> tuple[Tensor, Stats]:
    from xent.backends.torch.sharded import entry  # needs torch.distributed

    if call.inplace and quiet:
        _check_inplace(call.logits)
    logits, options = _classes_last(call.logits, options, call.axis)
    assert call.vocab_parallel is not None
    loss, stats = entry.cross_entropy(logits, options, call.vocab_parallel, call.inplace, quiet)
    made = _shaped(loss, stats, options.spec, logits.shape[:-1])
    return made if call.loss.stats else (made, Stats())


def _run_linear_in_shards(call: LinearCall, options: Options, quiet: bool) -> tuple[Tensor, Stats]:
    from xent.backends.torch.sharded import entry

    source, weight, bias = call.input, call.linear_weight, call.linear_bias
    needs = asks_for_gradient(source, weight, bias)
    compute = compute_dtype(source, weight, bias)
    linear = Linear(source, weight, bias, call.shift, call.workspace, compute, (needs[0], needs[1], needs[2]))
    assert call.vocab_parallel is not None
    loss, stats = entry.linear_cross_entropy(linear, options, call.vocab_parallel, quiet)
    target = call.target
    rows = target.shape[:-1] if target.is_floating_point() else target.shape
    made = _shaped(loss, stats, options.spec, rows)
    return made if call.loss.stats else (made, Stats())


def _classes_last(logits: Tensor, options: Options, axis: int) -> tuple[Tensor, Options]:
    """Move the classes to the last axis in logits, and in the options' class probabilities."""
    if axis == logits.dim() - 1:
        return logits, options
    if options.target.is_floating_point():
        options = options._replace(target=options.target.movedim(axis, -1))
    return logits.movedim(axis, -1), options


def _is_eager(*tensors: Any) -> bool:
    """Whether the call is eager, with plain tensors, and no tracer, transform or mode is active."""
    if private.is_watched():
        return False
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (
            type(tensor) not in private.PLAIN_TYPES or tensor.device.type == "meta" or tensor.is_neg()
        ):
            return False
    return True


def _compiles_a_transform() -> bool:
    return torch.compiler.is_compiling() and private.transforms_active()


def _finds_gradients_later() -> bool:
    """Whether the traced program decides at run time what is differentiated: see `differentiated`."""
    return private.is_exporting() or _compiles_a_transform()


def _shaped(loss: Tensor, stats: list[Tensor], spec: LossSpec, rows: torch.Size) -> Any:
    """Reshape flat per-row results (N,) to the shape of the rows."""
    each_row = spec.reduction == "none"
    if each_row:
        loss = loss.view(rows)
    if not spec.stats:
        return loss
    flat = (*ROW_STATS, *(["z_loss"] if each_row else []), *(["accuracy"] if spec.accuracy_of_rows else []))
    named: dict[str, Any] = {}
    for name, value in zip(spec.stats, stats, strict=True):
        named[name] = value.view(rows) if name in flat else value
    return loss, Stats(**named)


def _tensors(call: LogitsCall | LinearCall, *names: str) -> dict[str, Tensor]:
    """Return those of the named arguments that are tensors. A `normalizer` may be a number, others None."""
    found = {name: getattr(call, name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _check_inplace(logits: Tensor) -> None:
    if overlaps(logits):
        raise ValueError(
            f"inplace=True needs logits whose elements do not share memory, got shape {tuple(logits.shape)} with "
            f"strides {logits.stride()}"
        )
    if private.transforms_active():
        raise RuntimeError("inplace=True cannot be used under torch.func transforms: pass inplace=False")
