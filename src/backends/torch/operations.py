"""The custom operations of xent, which torch.compile, torch.export, modes, fake and meta tensors see.

A call is a text of field names and a list of tensors (`function`), as the public function received them. Shifts, checks
and collectives are inside, so that a graph has one node for each pass.

`requested` is empty in a graph: then the autograd kernel decides at run time what is differentiated, because an
exported program contains only operations. Tracing drops the autograd Function around them and `requires_grad` of
example inputs.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import private, refusals
from xent.backends.torch.codec import Slot, parse
from xent.backends.torch.contract import Upstream, columns, wide
from xent.backends.torch.function import Loss, has_memory, undisturbed
from xent.backends.torch.loop import backward, forward
from xent.backends.torch.memory import cast, gradient_like
from xent.backends.torch.plan import (
    Plan,
    compute_of,
    has_forward_gradients,
    leaves_of,
    requested_by,
    requested_by_flags,
)
from xent.backends.torch.prepare import is_per_row, prepare, rows_of
from xent.backends.torch.products import kept_dtype
from xent.backends.torch.signature import facts_of, slot_of
from xent.backends.torch.top_k import top_k
from xent.core.call import Call, Dense, Given, TopK, array_of
from xent.core.signature import binder

__all__ = ["decided"]

_LIBRARY = torch.library.Library("xent", "FRAGMENT")
_CALL = "str form, bool[] asked, str kernel, bool skips, Tensor[] tensors"


def _operation(schema: str, function: Callable[..., object], fake: Callable[..., object]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"xent::{name}", fake, lib=_LIBRARY)


_PLANS: dict[Any, tuple[Plan, Any]] = {}
_MOST = 1024  # plans; if there are more, the cache is cleared


def _planned(
    form: str, requested: list[bool], kernel: str, skips: bool, tensors: list[Tensor]
) -> tuple[Plan, Call, bool]:
    """Return the plan of an operation, its call, and whether the plan is new."""
    facts = [facts_of(tensor, name, -1) for tensor, name in zip(tensors, _names_of(form, len(tensors)), strict=True)]
    key = (form, tuple(requested), kernel, skips, *facts)
    planned, is_new = _PLANS.get(key), False
    if planned is None:
        if len(_PLANS) >= _MOST:
            _PLANS.clear()
        is_new, call = True, _with_slots(form, tensors)
        plan = Plan(call, requested_by_flags(requested or [False] * len(leaves_of(call))), kernel, skips)
        planned = _PLANS[key] = plan, binder(call)
    plan, bind = planned
    return plan, bind(tensors), is_new


@functools.lru_cache(_MOST)
def _names_of(form: str, count: int) -> tuple[str, ...]:
    """Return the caller's names of the tensors of a form, and empty ones of the numbers of a teacher."""
    names = [""] * count
    for name, slot in refusals.named(parse(form, [Slot(place) for place in range(count)]), Slot).items():
        names[slot.place] = name
    return tuple(names)


def _with_slots(form: str, tensors: Sequence[Tensor]) -> Call:
    """Return a call without tensors, from which a plan is made."""
    named = enumerate(zip(tensors, _names_of(form, len(tensors)), strict=True))
    return parse(form, [slot_of(tensor, name, place, -1).without_rows() for place, (tensor, name) in named])


def _forward(form: str, requested: list[bool], kernel: str, skips: bool, tensors: list[Tensor]) -> list[Tensor]:
    """Return the results; then, if gradients are requested, these or the sums for the backward pass."""
    plan, call, is_new = _planned(form, requested, kernel, skips, tensors)
    # Its numbers are checked once: no public function has done it if the program was exported.
    prepared = undisturbed(plan.device, prepare, call, plan.requested.leaves, plan.requested.scale, True, is_new)
    results: list[Tensor] = undisturbed(plan.device, forward, plan, prepared)
    return results


def _fake_forward(form: str, requested: list[bool], kernel: str, skips: bool, tensors: list[Tensor]) -> list[Tensor]:
    call = parse(form, tensors)
    options, compute, device = call.options, compute_of(call.source), array_of(call).device
    acc, count = wide(compute), math.prod(rows_of(call))  # symbolic sizes stay symbolic
    outputs = []
    for name in ("loss", *options.stats):
        dtype = torch.int64 if name in ("count", "predictions", "rank") else acc
        outputs.append(torch.empty((count,) if is_per_row(name, options) else (), dtype=dtype, device=device))
    if not any(requested):
        return outputs
    gradients = requested_by_flags(requested)
    needs = any(gradients.leaves) or gradients.scale
    if has_forward_gradients(call, needs):
        outputs += _like_leaves(call, [*gradients.leaves, False, False], True)
        outputs += [
            torch.empty((), dtype=acc, device=device) for _ in range(gradients.scale + (compute == torch.float16))
        ]
    elif needs and not isinstance(call.target, (Dense, TopK)):
        outputs.append(torch.empty((len(columns(call)), count), dtype=acc, device=device))
    return outputs


def _like_leaves(call: Call, requested: list[bool], retained: bool) -> list[Tensor]:
    """Return the requested gradients, empty; `retained`: in the dtypes in which they wait for the backward pass."""
    gradients = []
    for place, (leaf, needed) in enumerate(zip(leaves_of(call), requested, strict=True)):
        if needed and place == 0 and isinstance(call.source, Given):
            gradients.append(gradient_like(leaf))
        elif needed:
            gradients.append(leaf.new_empty(leaf.shape, dtype=kept_dtype(leaf.dtype) if retained else leaf.dtype))
    return gradients


def _backward(
    form: str,
    requested: list[bool],
    kernel: str,
    skips: bool,
    tensors: list[Tensor],
    saved: Tensor | None,
    *upstream: Tensor | None,
) -> list[Tensor]:
    """Return the requested gradients, in the dtypes of the tensors."""
    plan, call, _ = _planned(form, requested, kernel, skips, tensors)
    prepared = undisturbed(plan.device, prepare, call, plan.requested.leaves, plan.requested.scale, False)
    gradients = undisturbed(plan.device, backward, plan, prepared, plan.requested, False, saved, Upstream(*upstream))
    # The call of an eager loss has the number of a scale instead of its tensor.
    pairs = zip(gradients, leaves_of(call), strict=True)
    return [cast(gradient, getattr(leaf, "dtype", gradient.dtype)) for gradient, leaf in pairs if gradient is not None]


def _top_k(form: str, kernel: str, tensors: list[Tensor]) -> list[Tensor]:
    call = parse(form, tensors)
    ids_and_log_probs: list[Tensor] = undisturbed(array_of(call).device, top_k, call, kernel)
    return ids_and_log_probs


def _fake_top_k(form: str, kernel: str, tensors: list[Tensor]) -> list[Tensor]:
    call: Any = parse(form, tensors)
    shape, like = (math.prod(rows_of(call)), call.target.k), array_of(call)
    return [like.new_empty(shape, dtype=dtype) for dtype in (torch.int64, wide(compute_of(call.source)))]


def _refuse_second(upstream: Tensor, like: Tensor) -> Tensor:
    """Raise for a second derivative: at once, or when a graph that contains this operation runs.

    AOT Autograd traces the backward pass of everything that requires a gradient, even if it is never executed.
    """
    raise RuntimeError(refusals.NO_SECOND)


for _name in ("forward", "compute"):
    _operation(f"{_name}({_CALL}) -> Tensor[]", _forward, _fake_forward)
_operation("top_k(str form, str kernel, Tensor[] tensors) -> Tensor[]", _top_k, _fake_top_k)
_operation(
    f"backward({_CALL}, Tensor? saved, Tensor? loss, Tensor? lse, Tensor? nll, Tensor? entropy) -> Tensor[]",
    _backward,
    lambda form, requested, kernel, skips, tensors, *_: _like_leaves(parse(form, tensors), requested, False),
)
_operation(
    "refuse_second(Tensor upstream, Tensor like) -> Tensor",
    _refuse_second,
    lambda upstream, like: torch.empty_like(like),
)


def decided(form: str, kernel: str, skips: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the results of a call, and decide now what is differentiated."""
    call = parse(form, tensors)
    refusals.refuse(call, True)
    leaves = leaves_of(call)
    requested = requested_by(leaves)
    if not (any(requested.flags) or private.transforms_active()):
        return tuple(torch.ops.xent.compute(form, list(requested.flags), kernel, skips, list(tensors)))
    differentiated = [leaf for leaf, needed in zip(leaves, requested.flags, strict=True) if needed]
    try:
        plan = Plan(_with_slots(form, tensors), requested, kernel, skips, form)
        results = Loss.apply(plan, *differentiated, *tensors)
    except RuntimeError as error:
        if "unctionalize" not in str(error):
            raise
        named = refusals.named(call).items()
        name = next((name for name, tensor in named if not (has_memory(tensor) and tensor.data_ptr())), "a tensor")
        raise NotImplementedError(refusals.NO_FUNCTIONALIZE.format(name)) from error
    return tuple(results[: 1 + len(call.options.stats)])


def _autograd(form: str, requested: list[bool], kernel: str, skips: bool, tensors: list[Tensor]) -> list[Tensor]:
    return list(decided(form, kernel, skips, *tensors))


_LIBRARY.impl("forward", _autograd, "Autograd")
