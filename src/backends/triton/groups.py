"""The argument groups of kernels, each declared once: tensors that kernels, their device functions and launches share.

A group is passed as one argument. A member that a call does not have is None, and Triton compiles its branches away.
All members are contiguous tensors, because Triton specialises a compiled kernel for numbers in a group. Numbers are
arguments of their own. No member may be called `values` or `type`: Triton's tuples have these attributes.
"""

from typing import Any, NamedTuple

__all__ = ["Columns", "Results", "Rows", "Upstreams", "Way"]


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


class Columns(NamedTuple):
    """The columns of packed sums, a constant of kernels: their numbers, -1 for those that a call does not have.

    The names are those of `xent.backends.torch.contract.columns`. The first three columns are always there.
    """

    row_weight: int = -1
    below: int = -1
    weights: int = -1
    mixed: int = -1
    squares: int = -1
    deficit: int = -1
    counted: int = -1
    key: int = -1
    place: int = -1
    id: int = -1


class Way(NamedTuple):
    """How kernels compute rows of stored logits: one constant, which they pass on to their device functions."""

    capped: bool
    """Whether there is a softcap."""
    scaled: bool
    """Whether there is a logit scale."""
    smoothed: bool
    z_loss: bool
    all_rows: bool
    """Whether rows with weight 0 are computed, for statistics or gradients of these."""
    statistics: bool
    """Whether there are upstream gradients of statistics,"""
    tilted: bool
    """and among them one of the entropy."""
    entropy: bool = False
    """Which sums a fold computes besides that of exponentials: of e log2 e,"""
    squared: bool = False
    """of e^2,"""
    averaged: bool = False
    """and of x."""
    predicted: bool = False
    """Whether a fold finds the class of the largest x."""
    exact: bool = True
    """Whether exponents subtract the reference before they multiply: for float32 logits, and sums that are merged."""
    quick: bool = False
    """Whether a softcap may have a small error, see `activate`."""
    folds: bool = False
    """Whether the gradient's factor may go into the exponent."""
    grouped: bool = False
    """Whether rows are in several groups, see `position`."""
    skewed: bool = False
    """Whether rows may begin off 16-byte boundaries."""
    ragged: bool = False
    """Whether rows may begin or end off 16-byte boundaries."""
    vector: int = 1
    """Elements of 16 bytes; 1 if logits and gradient are aligned differently."""
    whole: bool = False
    """Whether the classes of each program are whole blocks."""
    block: int = 1
    lanes: int = 1
    """The number of partial sums of a row."""
    blocks: int = 1
    """At least the number of blocks of a program's classes, if they are aligned: a power of two."""
    parts: int = 1
    """The number of programs that share a row: a power of two."""
    phase: int = 0
    """See `xent.backends.triton.kernels.exchange`."""
