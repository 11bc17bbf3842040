"""Autograd: the Function of a call.

For "mean" and "sum" the forward pass computes the gradients. The backward pass multiplies them by the upstream
gradient, in place unless the graph is retained. All tensors for the backward pass are saved with `save_for_backward`,
so that saved-tensor hooks see them, and a second backward pass without retain_graph raises.

A plain call runs the passes of `loop` itself. Under tracers, transforms and modes the custom operations of `operations`
run them, and all tensors of the call are inputs of the Function. These operations take a call as a list of tensors and
one text of field names. Every value is a field of a NamedTuple and is found by its name. So a new option changes no
schema and no position.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from xent.backends.torch import private, refusals
from xent.backends.torch.contract import SCALES, Upstream
from xent.backends.torch.loop import Asked, backward, forward, made_first
from xent.backends.torch.memory import cast
from xent.core import call as calls
from xent.core.call import Call, Dense, Given, TopK, array_of, fields_of
from xent.core.spec import DIFFERENTIABLE, QuantizedRows

__all__ = [
    "Loss",
    "Once",
    "PlainLoss",
    "Run",
    "has_memory",
    "is_plain",
    "join",
    "parse",
    "split",
    "text",
    "undisturbed",
]

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_plain(tensors: Any) -> bool:
    """Return whether the tensors have memory and nothing is traced, so that no custom operation is needed.

    Batched tensors and those of ended transforms are of type Tensor, but have no memory.
    """
    if torch.compiler.is_dynamo_compiling() or private.dispatch_modes() or private.transforms_active():
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES or tensor.is_meta or tensor.is_neg() or not has_memory(tensor):
            return False
        if forward_ad.unpack_dual(tensor).tangent is not None:
            return False
    return not torch.jit.is_tracing()  # type: ignore[attr-defined]


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has memory. Those of transforms and batches do not."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def undisturbed(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` without gradients and autocast, with that device as the current one, where Triton launches."""
    kind = device.type
    if torch.is_grad_enabled():
        with torch.no_grad():
            return undisturbed(device, function, *args)
    if kind == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return undisturbed(device, function, *args)
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return undisturbed(device, function, *args)
    return function(*args)


def _scale(grads: list[Tensor], upstream: Tensor, deferred: Tensor | None, inplace: bool) -> list[Tensor]:
    """Return gradients times 0-d factors of the dtype of sums, rounded once; with `inplace` overwrite them."""
    factor = upstream if deferred is None else upstream * deferred
    if factor.is_cpu and inplace and float(factor) == 1:
        return grads
    made = []
    for grad in grads:
        # PyTorch would round a 0-d factor on an accelerator to the dtype of the gradient first.
        one = factor if factor.is_cpu or not grad.dim() else factor.reshape(1)
        made.append(torch.mul(grad, one, out=grad if inplace else torch.empty_like(grad)))
    return made


class _Slot(NamedTuple):
    """Stands for the tensor with this index in a list."""

    place: int


_KINDS: dict[str, Any] = {name: kind for name, kind in vars(calls).items() if hasattr(kind, "_replace")}
_RECORDS = tuple(_KINDS.values())


def _mapped(node: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Return a record with changed values of a kind, also in the records that it has."""
    fields = []
    for value in node:
        if isinstance(value, kind):
            fields.append(change(value))
        else:
            fields.append(_mapped(value, kind, change) if isinstance(value, _RECORDS) else value)
    return type(node)(*fields)


def split(call: Call, tensors: list[Tensor]) -> Any:
    """Append the tensors of a call to `tensors`; return the call with a slot in place of each."""

    def slot(value: Tensor) -> _Slot:
        tensors.append(value)
        return _Slot(len(tensors) - 1)

    return _mapped(call, Tensor, slot)


def join(call: Any, tensors: Any) -> Any:
    """Invert `split`."""
    return _mapped(call, _Slot, lambda slot: tensors[slot.place])


def text(value: Any) -> str:
    """Return a split call as JSON. `float.hex` is exact, and makes torch.compile treat a float as a constant."""
    if isinstance(value, _Slot):
        return '{"slot":' + str(value.place) + "}"
    if isinstance(value, _RECORDS):
        inner = [f'"{name}":' + text(one) for name, one in fields_of(value).items()]
        return "{" + ",".join([f'"type":"{type(value).__name__}"', *inner]) + "}"
    if isinstance(value, tuple):
        return "[" + ",".join([text(one) for one in value]) + "]"
    if isinstance(value, float):
        return '{"hex":"' + value.hex() + '"}'
    if isinstance(value, str):
        return '"' + value + '"'
    if value is None:
        return "null"
    if isinstance(value, (bool, int)):
        return str(value).lower()
    if isinstance(value, QuantizedRows):
        raise NotImplementedError(refusals.NO_QUANTIZED)
    return f'"{value.group_name}"'  # a process group


def parse(words: str, tensors: Any) -> Call:
    """Invert `text`, with the tensors in place. Fields are found by name; absent ones have their defaults."""

    def made(fields: dict[str, Any]) -> Any:
        if "slot" in fields:
            return tensors[fields["slot"]]
        if "hex" in fields:
            return float.fromhex(fields["hex"])
        return _KINDS[fields.pop("type")](**{name: _tuples(one) for name, one in fields.items()})

    call: Call = json.loads(words, object_hook=made)
    return call


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


class Run:
    """A call that is differentiated: how its passes run, and what they need to know."""

    def __init__(self, call: Call, asked: Asked, kernel: str, skips: bool = True, form: str = "") -> None:
        """`form`: the text of the call if its passes are custom operations; otherwise the call is prepared."""
        self.call: Any = None if form else call
        self.asked, self.kernel, self.skips, self.form = asked, kernel, skips, form
        self.names, self.device = ("loss", *call.options.stats), array_of(call).device
        reduced = call.options.reduction != "none" or isinstance(call.target, (Dense, TopK))
        self.linked = ("loss",) if reduced else ("loss", *DIFFERENTIABLE)
        """The results that have gradients."""
        self.first = made_first(call, (*asked[:-2], asked[-1]))
        self.reuse = isinstance(call.source, Given) and call.source.inplace and asked[0]

    def forward(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the results, and what the forward pass keeps in new memory for the backward pass."""
        if self.form:
            tensors = list(inputs[sum(self.asked) :])
            made: list[Tensor] = torch.ops.xent.compute(self.form, list(self.asked), self.kernel, self.skips, tensors)
            return made
        reuse = self.reuse and self.first
        made = undisturbed(self.device, forward, self.call, self.asked, self.kernel, self.skips, reuse)
        if reuse:
            torch.autograd.graph.increment_version(inputs[0])
        return made[: len(self.names)] if reuse else made

    def gradients(self, kept: Any, tensors: Any, upstream: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Return the gradients that were asked for, from what was kept and the tensors of the call."""
        plain = not self.form and is_plain([one for one in upstream if one is not None])
        drops = plain and not (torch.is_grad_enabled() or private.keeps_graph())
        made: list[Tensor | None] = [None] * len(self.asked)
        missing = self.asked
        if self.first:
            made = self._scaled(kept, upstream[0], plain, drops)
            missing = (*[False] * len(missing[:-2]), missing[-2], False)
        if any(missing):
            named = dict(zip(self.names, upstream, strict=True))
            given = Upstream(*[named.get(name) for name in Upstream._fields])
            sums = None if self.first or not kept else kept[0]
            if plain:
                call = join(self.call, [one.detach() for one in tensors])  # the result may be their memory
                reuse = self.reuse and drops and not self.first
                found = undisturbed(self.device, backward, call, missing, self.kernel, self.skips, reuse, sums, given)
                if reuse:
                    torch.autograd.graph.increment_version(call.source.logits)
            else:
                found = _by_operation(self, missing, tensors, sums, given)
            made = [one if new is None else new for one, new in zip(made, found, strict=True)]
        return [one for one, wanted in zip(made, self.asked, strict=True) if wanted]

    def _scaled(self, kept: Any, upstream: Any, plain: bool, drops: bool) -> list[Tensor | None]:
        """Return the kept gradients times the upstream gradient, rounded once; in place if nothing else needs them."""
        flags = (*self.asked[:-2], False, self.asked[-1])
        count = sum(flags)
        deferred = kept[count] if len(kept) > count else None
        if plain:
            arguments = [one.detach() for one in kept[:count]], upstream, deferred, drops
            return _placed(undisturbed(self.device, SCALES.get(self.kernel, _scale), *arguments), flags)
        # Dynamo of PyTorch 2.11 cannot trace `undisturbed`, which matters where kernels are launched.
        factor = upstream if deferred is None else upstream * deferred
        # PyTorch would round a 0-d factor to the dtype of the gradient first.
        scaled = [one * factor.reshape([1] * max(one.dim(), 1)) for one in kept[:count]]
        return _placed([new.to(one.dtype).reshape(one.shape) for new, one in zip(scaled, kept, strict=False)], flags)

    def refuse(self, message: str, values: Any) -> None:
        """Raise an error about the first tensor of a call whose place in the inputs has a value that is not None."""
        found = refusals.named(parse(self.form, values[sum(self.asked) :]))
        raise NotImplementedError(message.format(next(iter(found), "an argument")))


def _placed(values: Any, flags: Asked) -> list[Tensor | None]:
    """Return values at the places of flags that are True, and None at the others."""
    rest = iter(values)
    return [next(rest) if one else None for one in flags]


def _by_operation(run: Run, asked: Asked, tensors: Any, sums: Any, upstream: Upstream) -> list[Tensor | None]:
    """Return the gradients from the custom operation."""
    form, values = run.form or text(run.call), (sums, *upstream, *tensors)
    compiling = torch.compiler.is_dynamo_compiling()

    def gradients(sums: Any, *rest: Any) -> Any:
        if not compiling and any(type(one) in _PLAIN_TYPES and not has_memory(one) for one in rest[:4]):
            raise NotImplementedError(refusals.NO_BATCH)
        return torch.ops.xent.backward(form, list(asked), run.kernel, run.skips, list(rest[4:]), sums, *rest[:4])

    return _placed(gradients(*values) if compiling else Once.apply(gradients, *values), asked)


class Loss(torch.autograd.Function):
    """(`Run`, *leaves that get a gradient, *all tensors if there is a form) -> (*results, *what is kept)."""

    @staticmethod
    def forward(run: Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(run.forward(inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        run, *rest = inputs
        leaves, tensors = rest[: sum(run.asked)], rest[sum(run.asked) :]
        kept = output[len(run.names) :] if run.form or not (run.reuse and run.first) else leaves[:1]
        if run.first and not run.asked[-2]:
            tensors, run.call = [], None
        elif not run.form:
            run.call = split(run.call, tensors)
        ctx.run, ctx.kept, ctx.dtypes = run, len(kept), [leaf.dtype for leaf in leaves]
        ctx.save_for_backward(*kept, *tensors)
        constant = [output[at] for at, name in enumerate(run.names) if name not in run.linked]
        # What is kept connects the gradients to the graph, so that their derivatives raise an error.
        ctx.mark_non_differentiable(*constant, *(kept if run.form and not run.first else ()))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        run, count = ctx.run, len(ctx.run.names)
        again = next((one for one in upstream[count:] if one is not None), None)
        made: Any = [None] * len(ctx.dtypes)
        if again is not None and is_plain([again]):
            raise RuntimeError(refusals.NO_SECOND)
        if again is not None or any(one is not None for one in upstream[:count]):
            saved = ctx.saved_tensors
            if again is not None and not torch.compiler.is_dynamo_compiling():
                # While a tracer runs, which may not use the second derivative, raise later.
                made = [torch.ops.xent.refuse_second(again, leaf) for leaf in saved[: len(ctx.dtypes)]]
            elif run.form or not torch.is_grad_enabled():
                made = run.gradients(saved[: ctx.kept], saved[ctx.kept :], upstream[:count])
            else:
                arguments = saved[: ctx.kept], saved[ctx.kept :], upstream[:count]
                made = Once.apply(lambda *_: run.gradients(*arguments), *saved)
        made = [one if one is None else cast(one, dtype) for one, dtype in zip(made, ctx.dtypes, strict=True)]
        return None, *made, *[None] * (len(ctx.needs_input_grad) - 1 - len(made))

    @staticmethod
    def vmap(info: Any, in_dims: Any, run: Run, *inputs: Any) -> Any:
        """Raise an error."""
        values = [None if dim is None else one for one, dim in zip(inputs, in_dims[1:], strict=True)]
        run.refuse(refusals.NO_VMAP, values)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise an error."""
        ctx.run.refuse(refusals.NO_FORWARD_MODE, tangents[1:])


class PlainLoss(Loss):
    """`Loss` of a plain call. With a `setup_context`, PyTorch would bind the arguments in Python at every call."""

    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        output = tuple(run.forward(inputs))
        Loss.setup_context(ctx, (run, *inputs), output)
        return output


class Once(torch.autograd.Function):
    """(function, *tensors) -> function(*tensors), gradients. Its backward pass, a second derivative, raises."""

    @staticmethod
    def forward(function: Any, *tensors: Any) -> Any:
        return tuple(function(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Any, *tensors: Any) -> Any:
        """Run the function once per upstream gradient of a batch; torch.func.jacrev has one per row."""
        results = []
        for entry in range(info.batch_size):
            chosen = [
                one if dim is None else one.select(dim, entry) for one, dim in zip(tensors, in_dims[1:], strict=True)
            ]
            results.append(Once.apply(function, *chosen))
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        first = next((one for one in upstream if one is not None), None)
        if first is None:
            return (None,) * len(ctx.needs_input_grad)
        if is_plain([first]):
            raise RuntimeError(refusals.NO_SECOND)
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *[torch.ops.xent.refuse_second(first, like) if needs else None for like, needs in needed]
