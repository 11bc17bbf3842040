"""`Plan`: everything about how a call runs that follows from its signature, decided once.

It is made from a call with slots in place of values (`xent.core.signature`), so it holds no tensor, address, stream or
process group, and it cannot depend on a number, a value in a tensor, or the number of rows. Custom operations make one
from a call with numbers, which their text contains.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from xent.backends.torch.codec import places_of
from xent.backends.torch.contract import CONSTANTS, Setting, Upstream, columns
from xent.core.call import (
    Allowed,
    Call,
    Classes,
    Dense,
    Given,
    Probabilities,
    Source,
    TopK,
    array_of,
    vocabulary_of,
)
from xent.core.spec import DIFFERENTIABLE

__all__ = [
    "Plan",
    "Requested",
    "compute_of",
    "has_forward_gradients",
    "leaves_of",
    "requested_by",
    "requested_by_flags",
]


class Requested(NamedTuple):
    """Which gradients are requested."""

    leaves: tuple[bool, ...]
    """Those of logits; or of input, weight and bias."""
    probabilities: bool
    scale: bool

    @property
    def flags(self) -> tuple[bool, ...]:
        """All flags, in the order of `leaves_of`."""
        return *self.leaves, self.probabilities, self.scale


class Plan:
    """How the passes of a call run."""

    def __init__(self, call: Call, requested: Requested, kernel: str, skips: bool = True, form: str = "") -> None:
        """`call`: with the dtypes of its products. `kernel`: the name of the backend.

        `skips`: whether ignored rows may be left out of matrix products, for which the host may have to wait. `form`:
        the text of the call if its passes are custom operations.
        """
        if places_of(call):
            raise TypeError("a plan is made from slots, and the call has tensors")
        self.call, self.requested, self.kernel, self.skips, self.form = call, requested, kernel, skips, form
        self.flags = requested.flags
        options, source, target = call.options, call.source, call.target
        self.names = ("loss", *options.stats)
        self.device = array_of(call).device
        reduced = options.reduction != "none" or isinstance(target, (Dense, TopK))
        differentiable = ("loss",) if reduced else ("loss", *DIFFERENTIABLE)
        self.without_gradient = [index for index, name in enumerate(self.names) if name not in differentiable]
        """The places of the results that have no gradient."""
        self.dtypes = [
            getattr(leaf, "dtype", None)
            for leaf, needed in zip(leaves_of(call), requested.flags, strict=True)
            if needed
        ]
        """The dtypes of the gradients."""
        self.forward_gradients = has_forward_gradients(call, any(requested.leaves) or requested.scale)
        """Whether the forward pass computes the gradients."""
        self.reuse = isinstance(source, Given) and source.inplace and requested.leaves[0]
        """Whether the gradient of logits is written over them."""
        self.compute = compute_of(source)
        self.needs = _with_scale(call, requested.leaves) if requested.scale else requested.leaves
        """Which gradients of the leaves are computed, for themselves or for that of the scale."""
        self.columns = columns(call)
        self.places: Any = None
        """Where a prepared call has tensors (`codec.Places`), once one has been differentiated."""
        self._constants: dict[Upstream | None, Any] = {}

    def setting(self, call: Call, upstream: Upstream | None = None) -> Setting:
        """Return how a prepared call runs: a forward pass, or a backward pass for these upstream gradients."""
        source, target, shards = call.source, call.target, call.shards
        classes = vocabulary_of(source)
        first, size = (0, classes) if shards is None else (shards.first or 0, shards.size or 0)
        width = classes if shards is None else max(min(first + classes, size) - min(first, size), 0)
        if isinstance(target, (Classes, Allowed)):
            count = target.ids.shape[0]
        elif isinstance(target, Probabilities) and target.order is not None:
            count = target.order.shape[0]
        elif isinstance(target, Probabilities):  # hidden states may be this rank's tokens only
            count = target.probs.shape[:-1].numel()
        else:
            count = (source.logits if isinstance(source, Given) else source.input).shape[:-1].numel()
        in_forward = upstream is None and self.forward_gradients
        constants = self.constants(upstream)
        return Setting(
            *(call, count, size, first, width, self.compute, self.needs, self.device, in_forward),
            *(self.columns, constants, upstream),
        )

    def constants(self, upstream: Upstream | None) -> Any:
        """Return what the backend's steps decide once for a pass with these upstream gradients."""
        decide = CONSTANTS.get(self.kernel)
        if decide is None:
            return None
        flags = None if upstream is None else Upstream(*[gradient is not None for gradient in upstream])
        if flags not in self._constants:
            self._constants[flags] = decide(self, flags)
        return self._constants[flags]


def leaves_of(call: Call) -> tuple[Any, ...]:
    """Return the values to which the flags of `Requested` refer."""
    source = call.source
    leaves = (source.logits,) if isinstance(source, Given) else (source.input, source.weight, source.bias)
    probabilities = call.target.probs if isinstance(call.target, Probabilities) else None
    return (*leaves, probabilities, call.activation.logit_scale)


def requested_by(leaves: tuple[Any, ...]) -> Requested:
    """Return which gradients the leaves request."""
    enabled = torch.is_grad_enabled()
    return requested_by_flags([enabled and getattr(leaf, "requires_grad", False) for leaf in leaves])


def requested_by_flags(flags: Sequence[bool]) -> Requested:
    """Return what flags ask for."""
    *leaves, probabilities, scale = flags
    return Requested(tuple(leaves), probabilities, scale)


def compute_of(source: Source) -> torch.dtype:
    """Return the dtype of given logits, or of the matrix products that `prepare.typed` has selected."""
    dtype: torch.dtype = source.logits.dtype if isinstance(source, Given) else getattr(torch, source.dtype or "")
    return dtype


def has_forward_gradients(call: Call, needs: bool) -> bool:
    """Return whether the forward pass computes the gradients that a call `needs`: for losses that are one number.

    Float16 logits are an exception: a gradient could underflow before the upstream gradient scales it.
    """
    source = call.source
    if call.options.reduction == "none" or not needs:
        return False
    return not isinstance(source, Given) or source.logits.dtype != torch.float16


def _with_scale(call: Call, requested: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which gradients of the leaves are needed for that of the scale too."""
    if isinstance(call.source, Given):
        return (True,)
    return requested[0] or not requested[1], requested[1], call.source.bias is not None
