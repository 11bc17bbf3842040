"""Launches of kernels, and the argument groups that kernels, their device functions and launches share.

Each group is declared once, and passed as one argument. A member that a call does not have is a tensor without
elements, whose address is null (`absent`): kernels look at the address as they run, and one compiled kernel serves
calls with and without the member. Where that would cost time for each class, and in calls of targets alone, the member
is None, and Triton compiles its branches away.
Members are contiguous tensors, or floats: Triton specialises a compiled kernel for other numbers in a group. These are
arguments of their own. No member may be called `values` or `type`: Triton's tuples have these attributes.

Each kernel is compiled once for each combination of argument types, and later launches skip Triton's binder. The binder
takes 20 to 65 us of host time per launch, a launch of the compiled kernel 12 to 26 us. These kernels are specialised
for their constants, the types of their arguments, and the alignment of the tensors in argument groups (`kernel`). So a
compiled kernel is correct for every later launch with the same key.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from xent.backends.triton import compilations  # noqa: F401 (logs what the first launches compile)

__all__ = [
    "Columns",
    "Kernel",
    "Launch",
    "Numbers",
    "Results",
    "Rows",
    "Upstreams",
    "Way",
    "absent",
    "alignment",
    "cdiv",
    "is_interpreted",
    "kernel",
    "launch",
    "next_power_of_2",
    "no_results",
    "no_rows",
    "no_upstreams",
]

Kernel = Any
"""A kernel that Triton has compiled, compiles when it is launched, or interprets."""


class Numbers(NamedTuple):
    """The numbers of a call's options, as floats. `Rows.numbers` replaces them if one is a tensor."""

    keep: float
    """1 - e, for label smoothing e."""
    spread: float
    """e / V"""
    z_loss: float
    softcap: float
    logit_scale: float
    all_rows: float = 0.0
    """1 if rows with weight 0 are computed, for statistics or gradients of these."""


class Rows(NamedTuple):
    """What the rows of a call have besides logits: (N,) in the order of the call, unless another shape is given.

    All but the target, class weights and their sum may be null (`no_rows`). With targets alone, all but the target and
    the divisor are None.
    """

    target: Tensor | None
    """Integers; None for class probabilities."""
    sample_weight: Tensor | None = None
    class_weight: Tensor | None = None
    """(C,) float32: of the classes of this rank. Null if there are none, or None with label smoothing."""
    total_weight: Tensor | None = None
    """() float32: the sum of the class weights of this rank, with label smoothing."""
    divisor: Tensor | None = None
    """(3,) float32: the divisor D, what gradients of rows are divided by (0 if D is 0), and the remaining factor of
    float16 gradients. Null if D is 1."""
    temperature: Tensor | None = None
    numbers: Tensor | None = None
    """(4,) float32: label smoothing, z-loss, softcap and logit scale, if one of them is a tensor; they replace
    `Numbers`."""
    order: Tensor | None = None
    """int64: the rows in the order in which they are computed; null for that of the call."""


class Upstreams(NamedTuple):
    """Upstream gradients, (N,) float32 each, or null. If that of a statistic is given, gradients are for these."""

    loss: Tensor | None = None
    lse: Tensor | None = None
    nll: Tensor | None = None
    entropy: Tensor | None = None


class Results(NamedTuple):
    """The results of rows, (N,) float32 each, in the order of the call. Those not asked for are null.

    Those whose sums are not computed are None.
    """

    loss: Tensor | None = None
    lse: Tensor | None = None
    nll: Tensor | None = None
    entropy: Tensor | None = None
    predictions: Tensor | None = None
    """int64"""
    accuracy: Tensor | None = None
    """1 where the prediction is the target."""
    z_loss: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None


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

    capped: bool = False
    """Whether there is a softcap."""
    scaled: bool = True
    """Whether there may be a logit scale: without one it is 1 where it would cost time for each class."""
    smoothed: bool = False
    of_entropy: bool = False
    """Whether there may be an upstream gradient of the entropy."""
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
    grouped: bool = False
    """Whether rows are in several groups, see `position`."""
    skewed: bool = False
    """Whether rows may begin off 16-byte boundaries."""
    ragged: bool = False
    """Whether rows may begin or end off 16-byte boundaries."""
    vector: int = 1
    """Elements of 16 bytes; 1 if logits and gradient are aligned differently."""
    block: int = 1
    blocks: int = 1
    """At least the number of blocks of a program's classes, if they are aligned: a power of two."""
    parts: int = 1
    """The number of programs that share a row: a power of two."""


@cache
def absent(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor for what a call does not have. It has no memory, and its address is null."""
    return torch.empty(0, dtype=dtype, device=device)


@cache
def no_rows(device: torch.device) -> Rows:
    """Return the group of rows that have nothing."""
    nothing = absent(device)
    return Rows(None, nothing, nothing, None, nothing, nothing, nothing, absent(device, torch.int64))


@cache
def no_results(device: torch.device, known: tuple[str, ...]) -> Results:
    """Return the group without results, for kernels that know some statistics besides those that cost nothing."""
    names = {"loss", "lse", "nll", *known}
    if "predictions" in names or "accuracy" in names:
        names |= {"predictions", "accuracy"}
    dtypes = {name: torch.int64 if name == "predictions" else torch.float32 for name in names}
    return Results(**{name: absent(device, dtype) for name, dtype in dtypes.items()})


@cache
def no_upstreams(device: torch.device) -> Upstreams:
    """Return the group without upstream gradients."""
    return Upstreams(*[absent(device)] * len(Upstreams._fields))


_UNSPECIALISED = {int, float, Numbers, type(None)}
_launches: dict[tuple[object, ...], "Launch"] = {}
_MOST = 4096  # launches; if there are more, the cache is cleared


def kernel(function: Callable[..., None]) -> Kernel:
    """Return a Triton kernel. Numbers among its arguments have an annotation like "i64", and are not specialised."""
    parameters = inspect.signature(function).parameters.items()
    names = [name for name, parameter in parameters if "constexpr" not in str(parameter.annotation)]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


class Launch:
    """A kernel with its constants and options.

    It is compiled once for each kind of arguments: their dtypes, which of them are None, and the alignment of the
    tensors in argument groups. A launch of a plan is for one kind but for the alignment.
    """

    def __init__(self, function: Kernel, constants: Mapping[str, object], **options: object) -> None:
        """`options`: Triton's num_warps, maxnreg and enable_fp_fusion."""
        self._function, self._constants, self._options = function, constants, {"enable_fp_fusion": True} | options
        if torch.version.hip is not None:
            self._options.pop("maxnreg", None)  # Triton does not have it for AMD's GPUs
        self._interpreted = is_interpreted(function)
        self._compiled: dict[object, Kernel] = {}
        self._in_order: tuple[object, ...] = ()

    def __call__(self, kind: object, programs: int, *arguments: object) -> None:
        """Launch `programs` programs on the current device and stream.

        `kind`: what may vary in the kind of the arguments. `arguments` are tensors, None, numbers, argument groups and
        tensor descriptors, in the order of the parameters.
        """
        compiled = self._compiled.get(kind)
        if compiled is not None:
            compiled[(programs, 1, 1)](*arguments, *self._in_order)
            return
        function = self._function
        if self._interpreted:  # without the options
            function[(programs,)](*arguments, **self._constants)
            return
        compiled = function[(programs,)](*arguments, **self._constants, **self._options)
        if isinstance(compiled, triton.compiler.CompiledKernel):  # unless a hook kept Triton from compiling
            # First the constants: other threads may see the kernel at once.
            self._in_order = tuple([self._constants[name] for name in function.arg_names[len(arguments) :]])
            self._compiled[kind] = compiled


def launch(
    function: Kernel, programs: int, arguments: tuple[object, ...], constants: Mapping[str, object], **options: object
) -> None:
    """Launch a kernel whose constants, or the kind of whose arguments, are not those of a plan: see `Launch`."""
    key = (function.__name__, *constants.values(), *options.values())
    prepared = _launches.get(key)
    if prepared is None:
        if len(_launches) >= _MOST:
            _launches.clear()
        prepared = _launches[key] = Launch(function, constants, **options)
    kinds = [None if type(each) in _UNSPECIALISED else _kind(each) for each in arguments]
    prepared((torch.cuda.current_device() if torch.cuda.is_available() else None, *kinds), programs, *arguments)


def alignment(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Return which tensors begin at a multiple of 16 bytes."""
    return tuple([tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor is not None])


def _kind(argument: Any) -> object:
    """Return what a kernel is compiled for in a tensor, a group of tensors, or a descriptor for the copy engine."""
    if isinstance(argument, Tensor):
        return argument.dtype
    if isinstance(argument, tuple):  # Triton specialises the members of groups for aligned addresses
        return tuple([None if each is None else (each.dtype, each.data_ptr() % 16 == 0) for each in argument])
    return argument.base.dtype, *argument.block_shape


def is_interpreted(function: Kernel) -> bool:
    """Whether Triton interprets a kernel, on tensors of any device: its programs run one after the other."""
    return not isinstance(function, triton.JITFunction)


def cdiv(count: int, size: int) -> int:
    """Return count / size, rounded up. `triton.cdiv` takes a hundred times as long on the host."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two >= count, in a hundredth of the time of `triton.next_power_of_2`."""
    return 1 << max(count - 1, 0).bit_length()
