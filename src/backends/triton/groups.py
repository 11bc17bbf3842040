"""The argument groups of kernels, each declared once: tensors that kernels, their device functions and launches share.

A group is passed as one argument. A member that a call does not have is None, and Triton compiles its branches away.
All members are contiguous tensors, because Triton specialises a compiled kernel for numbers in a group. Numbers are
arguments of their own. No member may be called `values` or `type`: Triton's tuples have these attributes.
"""

from typing import Any, NamedTuple

__all__ = ["Results", "Rows", "Upstreams"]


class Rows(NamedTuple):
    """What the rows of a call have besides logits: (N,) in the order of the call, unless another shape is given."""

    target: Any = None
    """Integers; None for class probabilities."""
    sample_weight: Any = None
    class_weight: Any = None
    """(C,) float32: of the classes of this rank."""
    total_weight: Any = None
    """() float32: the sum of the class weights of this rank."""
    divisor: Any = None
    """(3,) float32: the divisor D, what gradients of rows are divided by (0 if D is 0), and the remaining factor of
    narrow gradients. None if D is 1."""
    temperature: Any = None
    numbers: Any = None
    """(4,) float32: label smoothing, z-loss, softcap and logit scale, if one of them is a tensor; they replace the
    numbers among the arguments."""
    order: Any = None
    """int64: the rows in the order in which they are computed; None for that of the call."""


class Upstreams(NamedTuple):
    """Upstream gradients, (N,) float32 each. If one but the loss's is given, gradients are for these."""

    loss: Any = None
    lse: Any = None
    nll: Any = None
    entropy: Any = None


class Results(NamedTuple):
    """The results of rows, (N,) float32 each, in the order of the call. Those not asked for are None."""

    loss: Any
    lse: Any = None
    nll: Any = None
    entropy: Any = None
    predictions: Any = None
    """int64"""
    hits: Any = None
    """1 where the prediction is the target."""
    z_term: Any = None
    log_sum_sq_probs: Any = None
    mean_logit: Any = None
