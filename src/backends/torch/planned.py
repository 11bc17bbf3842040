"""Calls of plain tensors: a plan is looked up by the call's signature, or made, and then bound to the call's values.

A later call of a known signature does only what depends on values: it checks that all arrays have the same rows and
that numbers are in their ranges, and runs. If a check fails, the arguments are described again, which raises the error
that a first call raises.
"""

from collections.abc import Callable
from itertools import compress
from typing import Any

from xent.backends.torch.entry import check_inplace
from xent.backends.torch.function import PlainLoss, Run, undisturbed
from xent.backends.torch.loop import forward
from xent.backends.torch.plan import Plan, leaves_of, requested_by
from xent.backends.torch.prepare import classes_last, is_last, is_prepared, prepare, shaped, typed
from xent.backends.torch.refusals import refuse
from xent.backends.torch.signature import Signature, signature_of, stand_ins
from xent.core.call import Call, Given, Options, array_of, replaced, without_temperature
from xent.core.describe import have_same_rows
from xent.core.signature import Function, binder, is_inside, with_slots
from xent.core.spec import LARGEST, Stats

__all__ = ["clear", "evaluate"]

_MOST = 1024  # plans; if there are more, the cache is cleared


class _Planned:
    """A plan, and how the operands of a call are put into it."""

    def __init__(self, function: Function, arguments: tuple[Any, ...], select: Callable[..., Any]) -> None:
        described, passed, numbers = stand_ins(function, arguments)
        call = typed(with_slots(function.describe(described, passed), numbers))
        backend = select(described["backend"], call, array_of(call), 4)
        backend.load()
        self.plan = Plan(call, requested_by(leaves_of(call)), backend.name)
        refuse(call, False)
        self.bind = binder(call)
        self.numbers = [(name.removeprefix("teacher."), slot.place) for name, slot in numbers.items()]
        self.has_temperature, self.moves = call.activation.temperature is not None, not is_last(call)
        self.prepared = is_prepared(call) and not self.moves
        self.overwrites = isinstance(call.source, Given) and call.source.inplace
        self.gathers = call.shards is not None and call.shards.axis is not None


_PLANS: dict[Signature, _Planned] = {}


def clear() -> None:
    """Forget all plans."""
    _PLANS.clear()


def evaluate(
    function: Function, arguments: tuple[Any, ...], select: Callable[..., Any]
) -> tuple[Options, Any, Stats] | None:
    """Return the options of a call and its results; None if it has no signature.

    `select`: the function that selects a backend for a call.
    """
    signed = signature_of(function, arguments)
    if signed is None:
        return None
    signature, operands = signed
    planned = _PLANS.get(signature)
    if planned is None:
        if len(_PLANS) >= _MOST:
            _PLANS.clear()
        planned = _PLANS[signature] = _Planned(function, arguments, select)
    valid = not planned.gathers
    for name, place in planned.numbers:
        number = operands[place]
        valid = valid and is_inside(name, number)
        if number > LARGEST and name in ("softcap", "temperature"):
            operands[place] = LARGEST
    call: Call = planned.bind(operands)
    if not (valid and have_same_rows(call)):
        described, passed, _ = stand_ins(function, arguments)
        function.describe(described, passed)
    plan = planned.plan
    if planned.has_temperature:
        call = without_temperature(call)
    if planned.moves:
        call = classes_last(call)
    if planned.overwrites:
        source: Any = call.source
        check_inplace(source.logits, plan.requested)
    in_rows, leaves = call, list(compress(leaves_of(call), plan.flags))
    if plan.requested.probabilities:
        target: Any = call.target
        call = replaced(call, target=replaced(target, probs=target.probs.detach()))
    if not planned.prepared:
        call = prepare(call, plan.requested.leaves, plan.requested.scale)
    if leaves:
        results = PlainLoss.apply(Run(plan, call), *leaves)[: len(plan.names)]
    else:
        results = undisturbed(plan.device, forward, plan, call)
    return plan.call.options, *shaped(results, in_rows)
