"""Autograd: a Function for eager calls, and one for compilers, transforms and modes.

For "mean" and "sum" the forward pass computes the gradients. The backward pass multiplies them by the upstream
gradient, in place unless the graph is retained. All tensors for the backward pass are saved with `save_for_backward`,
so that saved-tensor hooks see them, and a second backward pass without retain_graph raises.

A plain call runs `passes` directly (`Direct`). Under tracers, transforms and modes a Function calls the custom
operations of `operations` (`Traced`), and gradients that the forward pass computes are outputs of the Function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch import packing, private
from xent.backends.torch.contract import Upstream
from xent.backends.torch.memory import cast
from xent.backends.torch.passes import (
    PLAIN_TYPES,
    SCALES,
    Asked,
    backward,
    forward,
    is_plain,
    makes_first,
    scale,
    undisturbed,
)
from xent.backends.torch.refusals import NO_SECOND
from xent.core.call import Call, Dense, Given, TopK, array_of
from xent.core.spec import DIFFERENTIABLE

__all__ = ["BATCHED", "Direct", "DirectLoss", "FirstOrder", "Loss", "Traced", "linked_of"]


def _upstream_of(names: tuple[str, ...], given: Any) -> Upstream:
    return Upstream(given[0], **{name: given[at] for at, name in enumerate(names, 1) if given[at] is not None})


def linked_of(call: Call) -> tuple[str, ...]:
    """Return the statistics that have gradients: none of reduced losses and of divergences."""
    reduced = call.options.reduction != "none" or isinstance(call.target, (Dense, TopK))
    return () if reduced else DIFFERENTIABLE


class Direct:
    """One plain call: the loop, and what its backward pass needs."""

    def __init__(self, call: Call, asked: Asked, kernel: str) -> None:
        self.call: Call | None = call
        self.asked, self.kernel = asked, kernel
        self.stats, self.linked = call.options.stats, linked_of(call)
        self.first, self.device = makes_first(call, asked), array_of(call).device
        self.reuse = isinstance(call.source, Given) and call.source.inplace and asked[0]

    def forward(self, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the results, and an empty tensor that connects gradients to the autograd graph."""
        arguments = (self.call, self.asked, self.kernel, self.reuse and self.first, True)
        outcome, of_scale = undisturbed(self.device, forward, *arguments)
        kept = [made for made in (*outcome.gradients, of_scale) if made is not None] if self.first else []
        if self.reuse and self.first:
            torch.autograd.graph.increment_version(leaves[0])
            kept[0] = leaves[0]
        saved: list[Any] = []
        self.form = None
        if not self.first or self.asked[-2]:
            self.form = packing.split(self.call, saved)
        self.call = None
        self._saved: tuple[Any, ...] = (len(kept), *kept, outcome.deferred, outcome.saved, *saved)
        return *outcome.results, outcome.results[0].new_empty(0)

    def saved(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Return the tensors for the backward pass. They are handed over to autograd."""
        (self.count, *tensors), self._saved = self._saved, ()
        return outputs[-1], *tensors

    def constants(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the outputs that have no gradient."""
        found = zip(self.stats, outputs[1:], strict=False)
        return [value for name, value in found if name not in self.linked]

    def backward(self, ctx: Any, upstream: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Return the gradients that were asked for, in the order of `Asked`."""
        wanted = sum(self.asked)
        if all(one is None for one in upstream):
            return [None] * wanted
        anchor, *saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return self._gradients(saved, upstream)
        return list(FirstOrder.apply(lambda _: self._gradients(saved, upstream), anchor))

    def _gradients(self, saved: list[Any], upstream: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        kept, (deferred, sums, *tensors) = saved[: self.count], saved[self.count :]
        plain = is_plain([one for one in upstream if one is not None])
        drops = plain and not (torch.is_grad_enabled() or private.keeps_graph())
        made: list[Tensor | None] = [None] * len(self.asked)
        missing = self.asked
        if self.first:
            scales = iter(_scaled(self.kernel, kept, upstream[0], deferred, plain, drops))
            of_scale = self.asked[-1]
            made = [next(scales) if one else None for one in (*self.asked[:-2], False, of_scale)]
            missing = (*[False] * len(self.asked[:-2]), self.asked[-2], False)
        if any(missing):
            given = _upstream_of(self.stats, upstream)
            if plain:
                call = packing.join(self.form, [one.detach() for one in tensors])  # the result may be their memory
                reuse = self.reuse and drops and not self.first
                arguments = (call, missing, self.kernel, sums, given, reuse, True)
                found = undisturbed(self.device, backward, *arguments)
                if reuse:
                    torch.autograd.graph.increment_version(call.source.logits)
            else:
                found = _by_operation(packing.text(self.form), missing, self.kernel, True, sums, given, tensors)
            made = [one if new is None else new for one, new in zip(made, found, strict=True)]
        return [one for one, asked in zip(made, self.asked, strict=True) if asked]


def _by_operation(
    form: str, asked: Asked, kernel: str, skips: bool, sums: Any, upstream: Upstream, tensors: Any
) -> list[Any]:
    """Return the gradients from the custom operation, one upstream gradient of a batch at a time."""
    given = [sums, *upstream, *tensors]
    there = [one is not None for one in given]

    def run(*present: Tensor) -> tuple[Tensor, ...]:
        values = iter(present)
        sums, *of_results = [next(values) if one else None for one in there[:5]]
        rest = list(values)

        def gradients(*of_results: Tensor | None) -> list[Tensor]:
            found: list[Tensor] = torch.ops.xent.backward(form, list(asked), kernel, skips, rest, sums, *of_results)
            return found

        if torch.compiler.is_dynamo_compiling() or not any(map(_is_batched, of_results)):
            return tuple(gradients(*of_results))
        key = id(gradients)
        BATCHED[key] = gradients
        try:
            return tuple(torch.ops.xent.batched(key, *of_results)[: sum(asked)])
        finally:
            del BATCHED[key]

    present = [one for one in given if one is not None]
    made = iter(run(*present) if torch.compiler.is_dynamo_compiling() else FirstOrder.apply(run, *present))
    return [next(made) if one else None for one in asked]


BATCHED: dict[int, Callable[..., list[Tensor]]] = {}
"""Functions of upstream gradients that torch.autograd.grad(is_grads_batched=True) batches, for `xent::batched`."""


def _is_batched(upstream: Tensor | None) -> bool:
    """Return whether torch.autograd.grad(is_grads_batched=True) batches a tensor, which has no memory then."""
    if upstream is None or type(upstream) not in PLAIN_TYPES or upstream.is_meta:
        return False
    try:
        upstream.data_ptr()
    except RuntimeError:
        return True
    return False


def _scaled(
    kernel: str, kept: list[Tensor], upstream: Any, deferred: Tensor | None, plain: bool, drops: bool
) -> list[Tensor]:
    """Return kept * upstream * deferred, rounded once; in place if nothing else needs `kept`."""
    if plain:
        kept = [one.detach() for one in kept]
        made: list[Tensor] = undisturbed(upstream.device, SCALES.get(kernel, scale), kept, upstream, deferred, drops)
        return made
    factor = upstream if deferred is None else upstream * deferred
    # PyTorch would round a 0-d factor to the dtype of `kept` first.
    return [(one * factor.reshape([1] * max(one.dim(), 1))).to(one.dtype).reshape(one.shape) for one in kept]


class Traced:
    """One call whose passes are custom operations, in the form of a text and tensors."""

    def __init__(self, form: str, call: Call, asked: Asked, kernel: str, skips: bool, places: list[int]) -> None:
        """`places`: the index among the tensors of each value to which `asked` refers, -1 if it is no tensor."""
        self.form, self.asked, self.kernel, self.skips, self.places = form, asked, kernel, skips, places
        self.stats, self.linked = call.options.stats, linked_of(call)
        self.first = makes_first(call, asked)

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the results, then the gradients, and the factor that they lack, or the sums."""
        return tuple(torch.ops.xent.forward(self.form, list(self.asked), self.kernel, self.skips, list(tensors)))

    def saved(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors for the backward pass."""
        kept = outputs[1 + len(self.stats) :]
        self.count = len(kept)
        return (*kept, *inputs) if not self.first or self.asked[-2] else kept

    def constants(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the outputs that have no gradient. A made gradient has one, which raises."""
        results = 1 + len(self.stats)
        found = zip(self.stats, outputs[1:results], strict=False)
        constant = [value for name, value in found if name not in self.linked]
        return constant if self.first else [*constant, *outputs[results:]]

    def backward(self, ctx: Any, upstream: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Return the gradients of all tensors."""
        results = 1 + len(self.stats)
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad[1:])
        saved = ctx.saved_tensors
        kept, tensors = saved[: self.count], saved[self.count :]
        made: list[Tensor | None] = [None] * len(self.asked)
        again = [one for one in upstream[results:] if one is not None] if self.first else []
        if again and not torch.compiler.is_dynamo_compiling():
            # A gradient is being differentiated. While a tracer runs, which may not use it, raise later.
            likes = iter(kept)
            wanted = (*self.asked[:-2], False, self.asked[-1])
            made = [torch.ops.xent.refuse_second(again[0], next(likes)) if one else None for one in wanted]
        elif any(one is not None for one in upstream[:results]):
            missing = self.asked
            if self.first:
                missing = (*[False] * len(self.asked[:-2]), self.asked[-2], False)
                factors = kept[sum(self.asked) - self.asked[-2] :]
                scales = iter(_scaled("", list(kept), upstream[0], factors[0] if factors else None, False, False))
                made = [next(scales) if one else None for one in (*self.asked[:-2], False, self.asked[-1])]
            if any(missing):
                given = _upstream_of(self.stats, upstream[:results])
                sums = None if self.first or not kept else kept[0]
                found = _by_operation(self.form, missing, self.kernel, self.skips, sums, given, tensors)
                made = [one if new is None else new for one, new in zip(made, found, strict=True)]
        for place, one in zip(self.places, made, strict=True):
            if one is not None:
                grads[place] = one
        return grads


def _keep(ctx: Any, run: Direct | Traced, tensors: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    """Save what the backward pass of a `Loss` needs."""
    ctx.run = run
    ctx.dtypes = [tensor.dtype for tensor in tensors]
    ctx.save_for_backward(*(run.saved(output) if isinstance(run, Direct) else run.saved(tensors, output)))
    ctx.mark_non_differentiable(*run.constants(output))
    ctx.set_materialize_grads(False)


class Loss(torch.autograd.Function):
    """(`Traced`, *tensors) -> (loss, *statistics, *more), also under torch.func transforms."""

    @staticmethod
    def forward(run: Traced, *tensors: Tensor) -> tuple[Tensor, ...]:
        return run.forward(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs[0], inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        made = ctx.run.backward(ctx, upstream)
        return None, *[one if one is None else cast(one, dtype) for one, dtype in zip(made, ctx.dtypes, strict=True)]


class DirectLoss(torch.autograd.Function):
    """`Loss` of a `Direct`. With a `setup_context`, PyTorch would bind the arguments in Python at every call."""

    @staticmethod
    def forward(ctx: Any, run: Direct, *tensors: Tensor) -> tuple[Tensor, ...]:
        output = run.forward(tensors)
        _keep(ctx, run, tensors, output)
        return output

    backward = Loss.backward


class FirstOrder(torch.autograd.Function):
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
            results.append(FirstOrder.apply(function, *chosen))
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
