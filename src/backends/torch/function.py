"""Autograd: the Function of a call, and the Function of its gradients, which cannot be differentiated again.

For "mean" and "sum" the forward pass computes the gradients. The backward pass multiplies them by the upstream
gradient, in place unless the graph is retained. All tensors for the backward pass are saved with `save_for_backward`,
so that saved-tensor hooks see them, and a second backward pass without retain_graph raises.

The passes of plain calls are the functions of `passes`. Under tracers, transforms and modes they are the custom
operations of `operations`, and all tensors of the call are inputs of the Function.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import packing, private
from xent.backends.torch.contract import Upstream
from xent.backends.torch.loop import made_first
from xent.backends.torch.memory import cast
from xent.backends.torch.passes import (
    PLAIN_TYPES,
    SCALES,
    Asked,
    backward,
    forward,
    is_plain,
    scale,
    undisturbed,
)
from xent.backends.torch.refusals import NO_SECOND
from xent.core.call import Call, Dense, Given, TopK, array_of
from xent.core.spec import DIFFERENTIABLE

__all__ = ["BATCHED", "Loss", "Once", "PlainLoss", "Run"]

BATCHED: dict[int, Callable[..., list[Tensor]]] = {}
"""Functions of upstream gradients that torch.autograd.grad(is_grads_batched=True) batches, for `xent::batched`."""


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
                call = packing.join(self.call, [one.detach() for one in tensors])  # the result may be their memory
                reuse = self.reuse and drops and not self.first
                arguments = (call, missing, self.kernel, sums, given, self.skips, reuse)
                found = undisturbed(self.device, backward, *arguments)
                if reuse:
                    torch.autograd.graph.increment_version(call.source.logits)
            else:
                found = self._by_operation(missing, tensors, sums, given)
            made = [one if new is None else new for one, new in zip(made, found, strict=True)]
        return [one for one, wanted in zip(made, self.asked, strict=True) if wanted]

    def _scaled(self, kept: Any, upstream: Any, plain: bool, drops: bool) -> list[Tensor | None]:
        """Return the kept gradients times the upstream gradient, rounded once; in place if nothing else needs them."""
        flags = (*self.asked[:-2], False, self.asked[-1])
        count = sum(flags)
        deferred = kept[count] if len(kept) > count else None
        if plain:
            arguments = [one.detach() for one in kept[:count]], upstream, deferred, drops
            return _placed(undisturbed(self.device, SCALES.get(self.kernel, scale), *arguments), flags)
        # Dynamo of PyTorch 2.11 cannot trace `undisturbed`, which matters where kernels are launched.
        factor = upstream if deferred is None else upstream * deferred
        # PyTorch would round a 0-d factor to the dtype of the gradient first.
        scaled = [one * factor.reshape([1] * max(one.dim(), 1)) for one in kept[:count]]
        return _placed([new.to(one.dtype).reshape(one.shape) for new, one in zip(scaled, kept, strict=False)], flags)

    def _by_operation(self, asked: Asked, tensors: Any, sums: Any, upstream: Upstream) -> list[Tensor | None]:
        """Return the gradients from the custom operation, one upstream gradient of a batch at a time."""
        form = self.form or packing.text(self.call)

        def run(sums: Any, loss: Any, lse: Any, nll: Any, entropy: Any, *tensors: Tensor) -> list[Tensor]:
            def gradients(*upstream: Tensor | None) -> list[Tensor]:
                arguments = (form, list(asked), self.kernel, self.skips, list(tensors), sums, *upstream)
                found: list[Tensor] = torch.ops.xent.backward(*arguments)
                return found

            given = (loss, lse, nll, entropy)
            if torch.compiler.is_dynamo_compiling() or not any(map(_is_batched, given)):
                return gradients(*given)
            key = id(gradients)
            BATCHED[key] = gradients
            try:
                return list(torch.ops.xent.batched(key, *given)[: sum(asked)])
            finally:
                del BATCHED[key]

        values: tuple[Any, ...] = (sums, *upstream, *tensors)
        return _placed(run(*values) if torch.compiler.is_dynamo_compiling() else Once.apply(run, *values), asked)


def _placed(values: Iterable[Tensor], flags: Asked) -> list[Tensor | None]:
    """Return values at the places of flags that are True, and None at the others."""
    rest = iter(values)
    return [next(rest) if one else None for one in flags]


def _is_batched(upstream: Tensor | None) -> bool:
    """Return whether torch.autograd.grad(is_grads_batched=True) batches a tensor, which has no memory then."""
    if upstream is None or type(upstream) not in PLAIN_TYPES or upstream.is_meta:
        return False
    try:
        upstream.data_ptr()
    except RuntimeError:
        return True
    return False


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
            run.call = packing.split(run.call, tensors)
        ctx.run, ctx.kept, ctx.dtypes = run, len(kept), [leaf.dtype for leaf in leaves]
        ctx.save_for_backward(*kept, *tensors)
        constant = [value for name, value in zip(run.names, output, strict=False) if name not in run.linked]
        # What is kept connects the gradients to the graph, so that their derivatives raise an error.
        ctx.mark_non_differentiable(*constant, *(kept if run.form and not run.first else ()))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        run, count = ctx.run, len(ctx.run.names)
        again = next((one for one in upstream[count:] if one is not None), None)
        made: Any = [None] * len(ctx.dtypes)
        if again is not None or any(one is not None for one in upstream[:count]):
            saved = ctx.saved_tensors
            arguments = saved[: ctx.kept], saved[ctx.kept :], upstream[:count]
            if again is not None and not torch.compiler.is_dynamo_compiling():
                # While a tracer runs, which may not use the second derivative, raise later.
                made = [torch.ops.xent.refuse_second(again, leaf) for leaf in saved[: len(ctx.dtypes)]]
            elif run.form or not torch.is_grad_enabled():
                made = run.gradients(*arguments)
            else:
                made = Once.apply(lambda *_: run.gradients(*arguments), *saved)
        made = [one if one is None else cast(one, dtype) for one, dtype in zip(made, ctx.dtypes, strict=True)]
        return None, *made, *[None] * (len(ctx.needs_input_grad) - 1 - len(made))


class PlainLoss(torch.autograd.Function):
    """`Loss` of a plain call. With a `setup_context`, PyTorch would bind the arguments in Python at every call."""

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        output = tuple(run.forward(inputs))
        Loss.setup_context(ctx, (run, *inputs), output)
        return output

    backward = Loss.backward


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
            raise RuntimeError(NO_SECOND)
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *[torch.ops.xent.refuse_second(first, like) if needs else None for like, needs in needed]
