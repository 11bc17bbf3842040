"""Calls under a tracer, a transform or a mode, which go through custom operations. Others have a plan (`planned`).

The most probable classes are an operation in these calls only, and have no plan.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import operations, private
from xent.backends.torch.codec import split, text
from xent.backends.torch.contract import wide
from xent.backends.torch.function import is_plain, undisturbed
from xent.backends.torch.memory import overlaps
from xent.backends.torch.plan import Requested, compute_of, leaves_of, requested_by
from xent.backends.torch.prepare import classes_last, rows_of, shaped, typed
from xent.backends.torch.refusals import refuse
from xent.backends.torch.top_k import top_k
from xent.core.call import Call, Given, Options, Product, array_of, replaced, without_temperature
from xent.core.spec import QuantizedRows, Stats

__all__ = ["check_inplace", "run", "run_top_k"]


def run(call: Call, kernel: str) -> tuple[Tensor, Stats]:
    """Run a validated call under a tracer, a transform or a mode, with the steps of that backend."""
    call = classes_last(typed(without_temperature(call)))
    refuse(call, True)
    source = call.source
    compiling = torch.compiler.is_compiling()
    if isinstance(source, Given) and source.inplace:
        if not compiling:
            check_inplace(source.logits, requested_by(leaves_of(call)))
        call = replaced(call, source=replaced(source, inplace=False))  # a compiler plans memory itself
    if compiling:
        call = replaced(call, options=_symbolic(call))
    tensors: list[Tensor] = []
    form = text(split(_grouped(call), tensors))
    results: Any
    if torch.compiler.is_dynamo_compiling() and private.transforms_active():
        from xent.backends.torch import in_graph

        results = in_graph.decided(form, kernel, False, *tensors)
    elif compiling:
        results = torch.ops.xent.forward(form, [], kernel, False, tensors)
    else:
        results = operations.decided(form, kernel, True, *tensors)
    return shaped(results, call)


def run_top_k(call: Call, kernel: str) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities (..., K), without gradient, with the kernels of that backend."""
    call = _grouped(classes_last(typed(without_temperature(call))))
    source: Any = call.source
    quantized = isinstance(source, Product) and isinstance(source.weight, QuantizedRows)
    if quantized or is_plain(value for value in source if isinstance(value, Tensor)):
        results = undisturbed(array_of(call).device, top_k, call, kernel)
    else:
        tensors: list[Tensor] = []
        form = text(split(call, tensors))
        results = torch.ops.xent.top_k(form, kernel, [tensor.detach() for tensor in tensors])
    ids, log_probs = (result.view(*rows_of(call), result.shape[-1]) for result in results)
    return ids, log_probs


def _grouped(call: Call) -> Call:
    """Return a call with the name of its process group."""
    if call.shards is None:
        return call
    from xent.backends.torch.shards.ranges import group_of

    return replaced(call, shards=replaced(call.shards, group=group_of(call.shards.group).group_name))


def _symbolic(call: Call) -> Options:
    """Return options without numbers that may be new in every step: as constants, they would compile the graph again.

    PyTorch keeps a float symbolic in a product, but not in torch.full.
    """
    options = call.options
    unit = torch.ones((), dtype=wide(compute_of(call.source)), device=array_of(call).device)
    if isinstance(options.normalizer, (int, float)):
        options = replaced(options, normalizer=unit * options.normalizer)
    if options.head_weight is not None:
        options = replaced(options, head_weight=torch.stack([unit * weight for weight in options.head_weight]))
    return options


def check_inplace(logits: Tensor, requested: Requested) -> None:
    """Raise an error for logits that their gradient must not overwrite."""
    if not any(requested.flags):
        return
    for is_requested, name in ((requested.probabilities, "target"), (requested.scale, "logit_scale")):
        if is_requested:
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
