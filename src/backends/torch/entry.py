"""The entry of the PyTorch driver: how a call is run, and its results in the caller's shapes."""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import operations, private
from xent.backends.torch.contract import wide
from xent.backends.torch.function import PlainLoss, Run, is_plain, split, text, undisturbed
from xent.backends.torch.loop import asked_of, forward, leaves_of
from xent.backends.torch.memory import overlaps
from xent.backends.torch.prepare import aligned, compute_of, is_per_row, prepare, rows_of
from xent.backends.torch.refusals import refuse
from xent.core.call import Call, Dense, Given, Options, Probabilities, array_of, replaced
from xent.core.spec import Stats

__all__ = ["run"]

_NO_STATS = Stats()


def run(call: Call, kernel: str) -> tuple[Tensor, Stats]:
    """Run a validated call with the steps of that backend."""
    call = aligned(call)
    tensors = _tensors(call)
    results = _plain(call, kernel, tensors) if is_plain(tensors) else _traced(call, kernel)
    options, rows = call.options, rows_of(call)
    loss = results[0].view(rows) if options.reduction == "none" else results[0]
    if not options.stats:
        return loss, _NO_STATS
    found = zip(options.stats, results[1:], strict=True)
    return loss, Stats(**{name: one.view(rows) if is_per_row(name, options) else one for name, one in found})


def _tensors(call: Call) -> list[Tensor]:
    fields: list[Any] = [*call.source, *call.target, *call.activation, *call.options]
    if isinstance(call.target, Dense):
        fields.extend(call.target.source)
    return [value for value in fields if isinstance(value, Tensor)]


def _plain(call: Call, kernel: str, tensors: list[Tensor]) -> Any:
    leaves = leaves_of(call)
    asked = asked_of(leaves)
    if asked[-2] or asked[-1] or sum([tensor.requires_grad for tensor in tensors]) > sum(asked):
        refuse(call, False)
    if asked[-2]:
        assert isinstance(call.target, Probabilities)
        call = replaced(call, target=replaced(call.target, values=call.target.values.detach()))
    if isinstance(call.source, Given) and call.source.inplace:
        _check_inplace(call.source.logits, asked)
    prepared = prepare(call, asked[:-2], asked[-1])
    if any(asked):
        wanted = [leaf for leaf, one in zip(leaves, asked, strict=True) if one]
        return PlainLoss.apply(Run(prepared, asked, kernel), *wanted)[: 1 + len(call.options.stats)]
    return undisturbed(array_of(call).device, forward, prepared, asked, kernel, True)


def _traced(call: Call, kernel: str) -> Any:
    """Run a call under a tracer, a transform or a mode."""
    refuse(call, True)
    source, shards = call.source, call.shards
    compiling = torch.compiler.is_compiling()
    if isinstance(source, Given) and source.inplace:
        if not compiling:
            _check_inplace(source.logits, asked_of(leaves_of(call)))
        call = replaced(call, source=replaced(source, inplace=False))  # a compiler plans memory itself
    if compiling:
        call = replaced(call, options=_symbolic(call))
    if shards is not None:
        from xent.backends.torch.shards.ranges import group_of

        call = replaced(call, shards=replaced(shards, group=group_of(shards.group).group_name))
    tensors: list[Tensor] = []
    form = text(split(call, tensors))
    if torch.compiler.is_dynamo_compiling() and private.transforms_active():
        from xent.backends.torch import in_graph

        return in_graph.decided(form, kernel, False, *tensors)
    if compiling:
        return torch.ops.xent.forward(form, [], kernel, False, tensors)
    return operations.decided(form, kernel, True, *tensors)


def _symbolic(call: Call) -> Options:
    """Return options without numbers that may be new in every step: as constants, they would compile the graph again.

    PyTorch keeps a float symbolic in a product, but not in torch.full.
    """
    options = call.options
    one = torch.ones((), dtype=wide(compute_of(call.source)), device=array_of(call).device)
    if isinstance(options.normalizer, (int, float)):
        options = replaced(options, normalizer=one * options.normalizer)
    if options.head_weight is not None:
        options = replaced(options, head_weight=torch.stack([one * weight for weight in options.head_weight]))
    return options


def _check_inplace(logits: Tensor, asked: tuple[bool, ...]) -> None:
    if not any(asked):
        return
    for place, name in ((-2, "target"), (-1, "logit_scale")):
        if asked[place]:
            raise ValueError(
                f"inplace=True overwrites the logits, from which the gradient of {name} is computed: pass "
                f"inplace=False, or {name}.detach()"
            )
    if overlaps(logits):
        raise ValueError(
            f"inplace=True needs logits whose elements do not share memory, got shape {tuple(logits.shape)} with "
            f"strides {logits.stride()}"
        )
    if private.transforms_active():
        raise RuntimeError("inplace=True cannot be used under torch.func transforms: pass inplace=False")
