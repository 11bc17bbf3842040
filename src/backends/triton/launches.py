"""Launches of kernels, and the argument groups that kernels, their device functions and launches share.

Each group is declared once, and passed as one argument. A member that a call does not have is None, and Triton compiles
its branches away. Members are contiguous tensors, or floats: Triton specialises a compiled kernel for other numbers in
a group. These are arguments of their own. No member may be called `values` or `type`: Triton's tuples have these
attributes.

Each kernel is compiled once for each combination of argument types, and later launches skip Triton's binder. The binder
takes 20 to 65 us of host time per launch, a launch of the compiled kernel 12 to 26 us. These kernels are specialised
for their constants, the types of their arguments, and the alignment of the tensors in argument groups (`kernel`). So a
compiled kernel is correct for every later launch with the same key.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

__all__ = [
    "Columns",
    "Numbers",
    "Results",
    "Rows",
    "Upstreams",
    "Way",
    "cdiv",
    "is_interpreted",
    "kernel",
    "launch",
    "next_power_of_2",
]


class Numbers(NamedTuple):
    """The numbers of a call's options, as floats. `Rows.numbers` replaces them if one is a tensor."""

    keep: float
    """1 - e, for label smoothing e."""
    spread: float
    """e / V"""
    z_loss: float
    softcap: float
    logit_scale: float


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
    float16 gradients. None if D is 1."""
    temperature: Any = None
    numbers: Any = None
    """(4,) float32: label smoothing, z-loss, softcap and logit scale, if one of them is a tensor; they replace
    `Numbers`."""
    order: Any = None
    """int64: the rows in the order in which they are computed; None for that of the call."""


class Upstreams(NamedTuple):
    """Upstream gradients, (N,) float32 each. If that of a statistic is given, gradients are for these."""

    loss: Any = None
    lse: Any = None
    nll: Any = None
    entropy: Any = None


class Results(NamedTuple):
    """The results of rows, (N,) float32 each, in the order of the call. Those not asked for are None."""

    loss: Any = None
    lse: Any = None
    nll: Any = None
    entropy: Any = None
    predictions: Any = None
    """int64"""
    accuracy: Any = None
    """1 where the prediction is the target."""
    z_loss: Any = None
    log_sum_sq_probs: Any = None
    mean_logit: Any = None


class Columns(NamedTuple):
    """The columns of packed sums, a constant of kernels: their numbers, -1 for those that a call does not have.

    The names are those of `xent.backends.torch.contract.columns`. Device functions have the first seven as a tuple.
    """

    rest: int = -1
    below: int = -1
    weights: int = -1
    mixed: int = -1
    squares: int = -1
    deficit: int = -1
    counted: int = -1
    peak: int = -1
    target: int = -1
    row_weight: int = -1
    key: int = -1
    place: int = -1
    check: int = -1
    range: int = -1


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
    of_entropy: bool
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
    block: int = 1
    lanes: int = 1
    """The number of partial sums of a row."""
    blocks: int = 1
    """At least the number of blocks of a program's classes, if they are aligned: a power of two."""
    parts: int = 1
    """The number of programs that share a row: a power of two."""


_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
_UNSPECIALISED = {int, float, Numbers, type(None)}
_MOST = 4096  # kinds; if there are more, the cache is cleared


def kernel(function: Callable[..., Any]) -> Any:
    """Return a Triton kernel. Numbers among its arguments have an annotation like "i64", and are not specialised."""
    parameters = inspect.signature(function).parameters.items()
    names = [name for name, parameter in parameters if "constexpr" not in str(parameter.annotation)]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


def launch(function: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], **options: Any) -> None:
    """Launch `programs` programs on the current device and stream.

    `arguments` are tensors, None, numbers, argument groups and tensor descriptors, in the order of the parameters.
    `options` are Triton's num_warps, maxnreg and enable_fp_fusion, always in the same order.
    """
    if is_interpreted(function):  # without the options
        function[(programs,)](*arguments, **constants)
        return
    options.setdefault("enable_fp_fusion", True)
    if torch.version.hip is not None:
        options.pop("maxnreg", None)  # Triton does not have it for AMD's GPUs
    # id: a kernel's own hash is computed anew each time. It lives as long as its module.
    device = torch.cuda.current_device()
    kinds = [None if type(one) in _UNSPECIALISED else _kind(one) for one in arguments]
    key = (id(function), device, *kinds, *constants.values(), *options.values())
    found = _compiled.get(key)
    if found is not None:
        made, values = found
        made[(programs, 1, 1)](*arguments, *values)
        return
    made = function[(programs,)](*arguments, **constants, **options)
    if isinstance(made, triton.compiler.CompiledKernel):  # unless a hook kept Triton from compiling
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = made, tuple(constants[name] for name in function.arg_names[len(arguments) :])


def _kind(argument: Any) -> Any:
    """Return what a kernel is compiled for in a tensor, a group of tensors, or a descriptor for the copy engine."""
    if isinstance(argument, Tensor):
        return argument.dtype
    if isinstance(argument, tuple):  # Triton specialises the members of groups for aligned addresses
        return tuple([None if one is None else (one.dtype, one.data_ptr() % 16 == 0) for one in argument])
    return argument.base.dtype, *argument.block_shape


def is_interpreted(function: Any) -> bool:
    """Whether Triton interprets a kernel, on tensors of any device: its programs run one after the other."""
    return not isinstance(function, triton.JITFunction)


def cdiv(count: int, size: int) -> int:
    """Return count / size, rounded up. `triton.cdiv` takes a hundred times as long on the host."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two >= count, in a hundredth of the time of `triton.next_power_of_2`."""
    return 1 << max(count - 1, 0).bit_length()
