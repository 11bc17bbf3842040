"""The calls on a shard that eager functions and custom operations share: find the layout, then run the loop.

With XENT_CHECK_TARGETS=1, ranks also compare their targets.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch import private
from xent.backends.torch.environment import checks_targets
from xent.backends.torch.job import Upstream
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.torch.sharded import linear as linear_driver
from xent.backends.torch.sharded import logits as logits_driver
from xent.backends.torch.sharded.collectives import gather
from xent.backends.torch.sharded.layout import Layout, Mine, Refused, find
from xent.backends.torch.sharded.tokens import Tokens

__all__ = [
    "WHERE",
    "Where",
    "linear_backward",
    "linear_forward",
    "logits_backward",
    "logits_forward",
]

WHERE = "str group, int first, int size, int axis, bool reduces"


class Where(NamedTuple):
    """The arguments of `xent.VocabParallel` in the form that custom operations take, with schema `WHERE`."""

    group: str
    first: int
    """-1 if not given; the same for `size`."""
    size: int
    axis: int
    """The axis of the hidden states along which tokens are split; -1 if every rank has all tokens."""
    reduces: bool
    """Whether the call sums the gradient of the hidden states over ranks."""


def logits_forward(
    logits: Tensor, grad: Tensor | None, keeps: bool, where: Where, options: Options
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """See `xent.backends.torch.sharded.logits.forward`."""
    layout = _of_logits(logits, where, options)
    _check_targets(layout, options)
    return logits_driver.forward(logits, grad, keeps, options, layout)


def logits_backward(
    upstream: Upstream, logits: Tensor, kept: Tensor, where: Where, options: Options, inplace: bool
) -> Tensor:
    """See `xent.backends.torch.sharded.logits.backward`."""
    return logits_driver.backward(upstream, logits, kept, options, _of_logits(logits, where, options), inplace)


def linear_forward(
    linear: Linear, keeps: bool, where: Where, options: Options
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor], list[Tensor]]:
    """See `xent.backends.torch.sharded.linear.forward`."""
    layout = _of_linear(linear, where, options)
    _check_targets(layout, options)
    return linear_driver.forward(linear, options, layout, _tokens(where, options, layout), keeps)


def linear_backward(upstream: Upstream, linear: Linear, kept: Tensor, where: Where, options: Options) -> list[Tensor]:
    """See `xent.backends.torch.sharded.linear.backward`."""
    layout = _of_linear(linear, where, options)
    return linear_driver.backward(upstream, linear, kept, options, layout, _tokens(where, options, layout))


def _of_logits(logits: Tensor, where: Where, options: Options) -> Layout:
    return _layout(logits.shape[-1], where, (logits.dtype, *_kind(options)), logits, options)


def _of_linear(linear: Linear, where: Where, options: Options) -> Layout:
    width, needs = linear.input.shape[-1], tuple(linear.needs)
    here = (linear.compute, width, needs, linear.bias is None, linear.shift, linear.workspace)
    return _layout(
        len(linear.weight), where, (*here, where.axis, where.reduces, *_kind(options)), linear.weight, options
    )


def _kind(options: Options) -> tuple[Any, ...]:
    """Return the options that determine which collectives a call has. Numbers' values do not."""
    spec = options.spec
    return (
        options.kernel,
        spec.reduction,
        spec.stats,
        spec.exact,
        spec.label_smoothing != 0,
        options.weight is None,
        options.sample_weight is None,
        options.support_ids is None,
        options.target.is_floating_point(),
    )


def _layout(rows: int, where: Where, kind: tuple[Any, ...], shard: Tensor, options: Options) -> Layout:
    first, size = (None if value < 0 else value for value in (where.first, where.size))
    return find(private.group_named(where.group), Mine(rows, first, size, kind), shard, options.target)


def _tokens(where: Where, options: Options, layout: Layout) -> Tokens:
    axis = None if where.axis < 0 else where.axis
    length = 0 if axis is None else options.target.shape[axis]
    return Tokens(layout.group, axis, length, where.reduces)


def _check_targets(layout: Layout, options: Options) -> None:
    """Compare the arrays that have rows between ranks, if XENT_CHECK_TARGETS=1."""
    if not checks_targets():
        return
    names = ("target", "sample_weight", "temperature", "support_ids", "support_offsets")
    for name in names:
        values = getattr(options, name)
        if values is None or (name == "target" and values.is_floating_point()):
            continue
        flat = values.detach().flatten()
        number = torch.tensor([len(flat)], device=flat.device)
        lengths = gather(number, layout.group).land().flatten().tolist()
        for rank, length in enumerate(lengths):
            if length != lengths[0]:
                raise Refused(f"{name} has {lengths[0]} entries on rank 0 and {length} on rank {rank}")
        whole = gather(flat.contiguous(), layout.group).land()
        differs = (whole != whole[0]) & ~(whole.isnan() & whole[0].isnan())
        if bool(differs.any()):
            rank, entry = differs.nonzero()[0].tolist()
            position = [int(place) for place in torch.unravel_index(torch.tensor(entry), values.shape)]
            raise Refused(
                f"{name}{position or ''} differs between ranks: it is {whole[0, entry].item()} on rank 0 and "
                f"{whole[rank, entry].item()} on rank {rank}"
            )
