"""Autograd: the Function of a call.

For "mean" and "sum" the forward pass computes the gradients. The backward pass multiplies them by the upstream
gradient, in place unless the graph is retained. All tensors for the backward pass are saved with `save_for_backward`,
so that saved-tensor hooks see them, and a second backward pass without retain_graph raises.

`PlainLoss` runs the passes of `loop` itself. Under tracers, transforms and modes `Loss` calls the custom operations of
`operations`, and all tensors of the call are its inputs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from xent.backends.torch import private, refusals
from xent.backends.torch.codec import parse, places_of, put, split, take, text
from xent.backends.torch.contract import SCALES, Upstream
from xent.backends.torch.loop import backward, forward
from xent.backends.torch.plan import Plan, Requested
from xent.core.call import Call

__all__ = ["Loss", "Once", "PlainLoss", "Run", "has_memory", "is_plain", "undisturbed"]

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_plain(tensors: Iterable[Tensor]) -> bool:
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
    scaled = []
    for grad in grads:
        # PyTorch would round a 0-d factor on an accelerator to the dtype of the gradient first.
        multiplier = factor if factor.is_cpu or not grad.dim() else factor.reshape(1)
        scaled.append(torch.mul(grad, multiplier, out=grad if inplace else torch.empty_like(grad)))
    return scaled


class Run:
    """A plain call that is differentiated: its plan, and the prepared call."""

    __slots__ = ("call", "plan")

    def __init__(self, plan: Plan, call: Call) -> None:
        self.plan, self.call = plan, call


def _placed(gradients: Iterable[Tensor], flags: tuple[bool, ...]) -> list[Tensor | None]:
    """Return gradients at the places of flags that are True, and None at the others."""
    rest = iter(gradients)
    return [next(rest) if flag else None for flag in flags]


def _gradients(
    plan: Plan, call: Any, retained: Any, tensors: Any, upstream: tuple[Tensor | None, ...], plain: bool
) -> Sequence[Tensor | None]:
    """Return the requested gradients, from what was retained, the call without its tensors, and these.

    `plain`: whether the passes run here; otherwise they are custom operations. Gradients may
    overwrite what was retained if the graph is not.
    """
    may_overwrite = plain and not (torch.is_grad_enabled() or private.keeps_graph())
    if not plan.forward_gradients:
        return _computed(
            plan, call, plan.requested, retained[0] if retained else None, tensors, upstream, plain, may_overwrite
        )
    requested = plan.requested
    flags = requested._replace(probabilities=False).flags
    gradients = _placed(_scaled(plan, sum(flags), retained, upstream[0], plain, may_overwrite), flags)
    if requested.probabilities:
        only = Requested((False,) * len(requested.leaves), True, False)
        (of_probabilities,) = _computed(plan, call, only, None, tensors, upstream, plain, may_overwrite)
        gradients[len(requested.leaves)] = of_probabilities
    return [gradient for gradient, needed in zip(gradients, plan.flags, strict=True) if needed]


def _scaled(
    plan: Plan, count: int, retained: Sequence[Tensor], upstream: Any, plain: bool, may_overwrite: bool
) -> list[Tensor]:
    """Return the `count` retained gradients times the upstream gradient, rounded once; in place if they may."""
    deferred = retained[count] if len(retained) > count else None
    if plain:
        gradients = [gradient.detach() for gradient in retained[:count]]
        scaled: list[Tensor]
        scaled = undisturbed(plan.device, SCALES.get(plan.kernel, _scale), gradients, upstream, deferred, may_overwrite)
        return scaled
    # Dynamo of PyTorch 2.11 cannot trace `undisturbed`, which matters where kernels are launched.
    factor = upstream if deferred is None else upstream * deferred
    # PyTorch would round a 0-d factor to the dtype of the gradient first.
    scaled = [gradient * factor.reshape([1] * max(gradient.dim(), 1)) for gradient in retained[:count]]
    return [new.to(old.dtype).reshape(old.shape) for new, old in zip(scaled, retained, strict=False)]


def _computed(
    plan: Plan,
    call: Any,
    requested: Requested,
    sums: Any,
    tensors: Any,
    upstream: Any,
    plain: bool,
    may_overwrite: bool,
) -> list[Tensor]:
    """Return the requested gradients, from the saved sums and the call."""
    by_name = dict(zip(plan.names, upstream, strict=True))
    of_results = Upstream(*[by_name.get(name) for name in Upstream._fields])
    if not plain:
        return _by_operation(plan, call, requested, tensors, sums, of_results)
    call = put(call, plan.places, iter([tensor.detach() for tensor in tensors]))  # the result may be their memory
    reuse = plan.reuse and may_overwrite and not plan.forward_gradients
    gradients = undisturbed(plan.device, backward, plan, call, requested, reuse, sums, of_results)
    if reuse:
        torch.autograd.graph.increment_version(call.source.logits)
    return [gradient for gradient, needed in zip(gradients, requested.flags, strict=True) if needed]


def _by_operation(
    plan: Plan, call: Any, requested: Requested, tensors: Any, sums: Any, upstream: Upstream
) -> list[Tensor]:
    """Return the gradients from the custom operation."""
    form = plan.form or text(split(put(call, plan.places, iter(tensors)), []))
    operands, flags = (sums, *upstream, *tensors), list(requested.flags)
    compiling = torch.compiler.is_dynamo_compiling()

    def gradients(sums: Any, *rest: Any) -> Any:
        if not compiling and any(type(tensor) in _PLAIN_TYPES and not has_memory(tensor) for tensor in rest[:4]):
            raise NotImplementedError(refusals.NO_BATCH)
        return torch.ops.xent.backward(form, flags, plan.kernel, plan.skips, list(rest[4:]), sums, *rest[:4])

    return list(gradients(*operands) if compiling else Once.apply(gradients, *operands))


def _differentiated(ctx: Any, plan: Plan, call: Any, upstream: tuple[Any, ...]) -> list[Any]:
    """Return the gradients of the leaves in their dtypes, for those of results and of what is retained."""
    count, again = len(plan.names), None
    gradients: list[Any] = [None] * len(plan.dtypes)
    if len(upstream) > count:
        again = next((gradient for gradient in upstream[count:] if gradient is not None), None)
        upstream = upstream[:count]
    if again is not None and is_plain([again]):
        raise RuntimeError(refusals.NO_SECOND)
    used = [gradient for gradient in upstream if gradient is not None]
    if again is None and not used:
        return gradients
    saved = ctx.saved_tensors
    retained, tensors = saved[: ctx.retained], saved[ctx.retained :]
    if again is not None and not torch.compiler.is_dynamo_compiling():
        # While a tracer runs, which may not use the second derivative, raise later.
        gradients = [torch.ops.xent.refuse_second(again, leaf) for leaf in saved[: len(plan.dtypes)]]
    elif plan.form or not torch.is_grad_enabled():
        plain = not plan.form and is_plain(used)
        gradients = list(_gradients(plan, call, retained, tensors, upstream, plain))
    else:
        plain = is_plain(used)
        gradients = Once.apply(lambda *_: _gradients(plan, call, retained, tensors, upstream, plain), *saved)
    return _typed(gradients, plan.dtypes)


def _typed(gradients: Sequence[Tensor | None], dtypes: list[Any]) -> list[Tensor | None]:
    """Return gradients in the dtypes of their leaves."""
    return [
        gradient if gradient is None or gradient.dtype == dtype else gradient.to(dtype)
        for gradient, dtype in zip(gradients, dtypes, strict=True)
    ]


class PlainLoss(torch.autograd.Function):
    """(`Run`, *leaves that get a gradient) -> (*results, *what is retained)."""

    @staticmethod
    def forward(ctx: Any, run: Run, *leaves: Tensor) -> tuple[Tensor, ...]:
        plan, call, count = run.plan, run.call, len(run.plan.names)
        reuse = plan.reuse and plan.forward_gradients
        results = undisturbed(plan.device, forward, plan, call, reuse)
        retained, tensors = results[count:], list[Tensor]()
        if reuse:
            torch.autograd.graph.increment_version(leaves[0])
            results, retained = results[:count], leaves[:1]
        ctx.plan, ctx.call, ctx.retained = plan, None, len(retained)
        if not plan.forward_gradients or plan.requested.probabilities:
            if plan.places is None:
                plan.places = places_of(call)
            ctx.call = take(call, plan.places, tensors)
        ctx.save_for_backward(*retained, *tensors)
        # What is retained connects the gradients to the graph, so that their derivatives raise an error.
        if plan.without_gradient:
            ctx.mark_non_differentiable(*[results[index] for index in plan.without_gradient])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, loss: Any, *others: Any) -> Any:
        plan, alone = ctx.plan, others.count(None) == len(others)
        if ctx.call is None and alone and not torch.is_grad_enabled() and is_plain([loss]):
            may_overwrite = not private.keeps_graph()
            gradients = _scaled(plan, len(plan.dtypes), ctx.saved_tensors, loss, True, may_overwrite)
            return None, *_typed(gradients, plan.dtypes)
        return None, *_differentiated(ctx, plan, ctx.call, (loss, *others))


class Loss(torch.autograd.Function):
    """(`Plan`, *leaves that get a gradient, *all tensors) -> (*results, *what is retained)."""

    @staticmethod
    def forward(plan: Plan, *inputs: Tensor) -> tuple[Tensor, ...]:
        tensors = list(inputs[sum(plan.flags) :])
        return tuple(torch.ops.xent.compute(plan.form, list(plan.flags), plan.kernel, plan.skips, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        plan, *rest = inputs
        retained, tensors = output[len(plan.names) :], rest[sum(plan.flags) :]
        ctx.plan, ctx.retained = plan, len(retained)
        ctx.save_for_backward(
            *retained, *(() if plan.forward_gradients and not plan.requested.probabilities else tensors)
        )
        ctx.mark_non_differentiable(
            *[output[index] for index in plan.without_gradient], *(() if plan.forward_gradients else retained)
        )
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        gradients = _differentiated(ctx, ctx.plan, None, upstream)
        return None, *gradients, *[None] * (len(ctx.needs_input_grad) - 1 - len(gradients))

    @staticmethod
    def vmap(info: Any, in_dims: Any, plan: Plan, *inputs: Any) -> Any:
        """Raise an error."""
        batched = [None if dim is None else tensor for tensor, dim in zip(inputs, in_dims[1:], strict=True)]
        _refuse(plan, refusals.NO_VMAP, batched)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise an error."""
        _refuse(ctx.plan, refusals.NO_FORWARD_MODE, tangents[1:])


def _refuse(plan: Plan, message: str, operands: Sequence[Tensor | None]) -> None:
    """Raise an error about the first tensor of a call whose place in the inputs has a value that is not None."""
    named = refusals.named(parse(plan.form, operands[sum(plan.flags) :]))
    raise NotImplementedError(message.format(next(iter(named), "an argument")))


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
                tensor if dim is None else tensor.select(dim, entry)
                for tensor, dim in zip(tensors, in_dims[1:], strict=True)
            ]
            results.append(Once.apply(function, *chosen))
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        first = next((gradient for gradient in upstream if gradient is not None), None)
        if first is None:
            return (None,) * len(ctx.needs_input_grad)
        if is_plain([first]):
            raise RuntimeError(refusals.NO_SECOND)
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *[torch.ops.xent.refuse_second(first, like) if needs else None for like, needs in needed]
