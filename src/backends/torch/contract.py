"""The contract between the loop and a device's steps: read this before `loop`, or to add a device.

`loop` asks the function in `STEPS` for a `Steps` of one prepared call, and then, for each part of its rows::

    whole_rows                      everything in one launch, if the device can and the classes are all here
    or: fold, gather, finish, gradient, with the K sums of R rows packed into a (K, R) tensor

The sums of a row over some classes, in the order of `columns`. x is as in `xent.cross_entropy`, z the raw logits, y the
target, w the class weights, q the target probabilities, w' = w ((1-e) q + e/V) the share of a class in the loss, and
`peak` a reference near the largest x of these classes without the target, -inf if all are -inf or there are none::

    peak, rest    rest = sum_{c != y} e^(x_c - peak)
    target        z_y where the target is among these classes, else 0             class indices only, like the next two
    row_weight    w_y where the target is among them, else 0                      with class weights
    below         sum_{c != y} w_c (peak - x_c)                                   with label smoothing
    weights       sum_{c != y} w_c                                                with label smoothing
    cost, mass    sum_c w'_c (peak - x_c), sum_c w'_c                             class probabilities only
    surprise, given     sum_c q_c (peak - x_c), sum_c q_c                         class probabilities, statistic nll
    likely, truth       the largest q and its class                               class probabilities, accuracy
    mixed         sum_{c != y} e^(x_c - peak) (x_c - peak)                        statistic entropy
    squares       sum_{c != y} e^(2 (x_c - peak))                                 log_sum_sq_probs
    deficit, counted    sum_c (peak - x_c) with the target, number of classes c   mean_logit
    key, place    the largest z in the order of x (NaN is largest) and its class  predictions, accuracy
    check, range  checksums of the row and of these classes, see `shards.checks`  in shards, all targets

Those of a divergence in shards, with `peak`, `rest` and `mixed` over all classes, and the x_q of a dense teacher::

    peak, rest    for a dense teacher, or statistic entropy, with which there is mixed
    teacher_peak, teacher_rest, teacher_top    the same of x_q, and the x_q of the class with the largest x    dense
    others_peak, others_rest, known_0 ...      the same without the K classes, and their x, -inf elsewhere      top k

With class probabilities no class is left out as the target. With a support all sums are over the row's support; the x
of other classes is -inf. Classes (truth, place) and checksums are the bits of int32, in float64 sums of int64; classes
are global. Merged, `range` is that of [0, V), unless the rows of the ranks differ or their classes do not tile [0, V).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xent.core.call import Activation, Call, Dense, Probabilities, TopK, differs
from xent.core.spec import DIFFERENTIABLE, Scalar

__all__ = [
    "CONSTANTS",
    "COUNT_ABOVE",
    "LARGEST",
    "SCALES",
    "STEPS",
    "Block",
    "Coefficients",
    "Loaded",
    "Part",
    "Schedule",
    "Setting",
    "Steps",
    "Upstream",
    "columns",
    "exact",
    "partitioned",
    "smooths",
    "wide",
]


Coefficients = Any
"""What `Steps.finish` returns for `Steps.gradient`, in the form of a device."""

_NONE: Any = None


class Upstream(NamedTuple):
    """The upstream gradients of a call's results: (N,), that of a reduced loss 0-d; None for results not used.

    A plan, which has no tensors, has True in place of a gradient, and False in place of None.
    """

    loss: Any = None
    lse: Any = None
    nll: Any = None
    entropy: Any = None


class Setting(NamedTuple):
    """A prepared call and how it is run."""

    call: Call
    count: int  # type: ignore[assignment]  # not a method of the tuple
    """The number N of rows."""
    vocabulary: int
    """The number V of classes, over all ranks."""
    first: int
    """The first class of this rank; 0 without shards."""
    width: int
    """The number C of classes of this rank, without padding."""
    compute: torch.dtype
    """The dtype of given logits, or of the matrix products."""
    needs: tuple[bool, ...]
    """Whether each leaf, the arrays of the source, needs a gradient: logits; or input, weight and bias."""
    device: torch.device
    """The device of all tensors."""
    forward_gradients: bool
    """Whether the forward pass computes the gradients."""
    columns: tuple[str, ...]
    """The names of the packed sums."""
    constants: Any
    """What the steps decided for the plan: see `CONSTANTS`."""
    upstream: Upstream | None = None
    """None in a forward pass."""

    @property
    def in_float16(self) -> bool:
        """Whether a forward pass stores gradients in float16, scaled to its range (`Steps.deferred`)."""
        return self.forward_gradients and self.compute == torch.float16


class Part(NamedTuple):
    """Rows [start, stop) in the order in which rows are computed."""

    start: int
    stop: int
    rows: Tensor | None = None
    """(R,) int64, the indices of these rows in the call; None if they are [start, stop)."""
    last: bool = True
    """Whether this is known to be the last part."""

    @property
    def indices(self) -> slice | Tensor:
        """The indices of these rows in the call."""
        return slice(self.start, self.stop) if self.rows is None else self.rows

    def put(self, array: Tensor, place: Tensor) -> None:
        """Write an array (R, ...) to these rows of `place` (N, ...)."""
        if self.rows is None:
            place[self.start : self.stop] = array
        else:
            place.index_copy_(0, self.rows, array.to(place.dtype))


class Schedule:
    """The rows of a call in the order of computation, in parts of `step` rows.

    Rows that need no work are skipped. The number of remaining rows must be known before a matrix product starts. On
    the CPU the host reads it from memory. On CUDA the number is on the device: the rows to compute are moved to the
    front, the first part starts without the number, and the host waits for it before the second part, while the device
    computes the first. A call with a single part, in a CUDA graph or in a compiled graph, computes all rows and does
    not wait. Ranks that gather sums compute as many rows as the rank that has most, so that they make the same
    collectives even if their targets differ.
    """

    def __init__(self, steps: "Steps", setting: Setting, step: int, skips: bool) -> None:
        """`skips`: whether rows that need no work may be left out, for which the host may have to wait."""
        self.step, self._all, device = max(step, 1), setting.count, setting.device.type
        self._order: Tensor | None = None
        self._awaited: tuple[Tensor, torch.cuda.Event] | None = None
        self.count = setting.count
        """The number of rows to compute; an upper bound until the host knows it."""
        on_cuda = device == "cuda" and setting.count > step and not torch.cuda.is_current_stream_capturing()
        skips, shards = skips and setting.count > 0 and (on_cuda or device == "cpu"), setting.call.shards
        gathers = skips and shards is not None and not (setting.upstream is not None and steps.saves)
        partition = steps.partition() if skips else None
        if gathers and partition is None:
            partition = partitioned(torch.zeros(setting.count, dtype=torch.bool, device=setting.device))
        if partition is None:
            return
        order, count = partition
        if gathers and shards is not None:
            from xent.backends.torch.shards.collectives import gather

            count = gather(count.view(1), shards.group).wait().amax()
        if on_cuda:
            on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
            on_host.copy_(count, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._awaited = on_host, event
        else:
            self.count = int(count)
        if on_cuda or self.count < self._all:
            self._order = order

    @property
    def rows(self) -> int:
        """The number of rows of the largest part."""
        return max(min(self.step, self.count), 0)

    @property
    def chunks(self) -> int:
        """The number of parts; an upper bound until the host knows it."""
        return -(-self.count // self.step)

    @property
    def left_out(self) -> Tensor | None:
        """The indices (M,) int64 of the rows that were skipped, or None. Valid after the last part."""
        return None if self._order is None else self._order[self.count :]

    def __iter__(self) -> Iterator[Part]:
        """Yield the parts; at least one if any row has to be computed."""
        start = 0
        while start < self.count:
            stop = min(start + self.step, self.count)
            rows = None if self._order is None else self._order[start:stop]
            yield Part(start, stop, rows, stop == self.count)
            start = stop
            if self._awaited is not None:
                on_host, event = self._awaited
                event.synchronize()
                self.count, self._awaited = int(on_host), None
                if self.count == self._all:
                    self._order = None  # all rows in the call's order, because the partition is stable


def partitioned(skippable: Tensor) -> tuple[Tensor, Tensor]:
    """Return `Steps.partition` for rows (N,) bool to leave out."""
    return skippable.argsort(stable=True), (~skippable).sum()


class Block(NamedTuple):
    """Logits of some rows of a part and some classes of this rank."""

    logits: Tensor
    """(R, C) with contiguous rows, raw; or of given logits (..., C) of any strides."""
    start: int = 0
    """The first row, relative to the part's."""
    first: int = 0
    """The first class, relative to this rank's."""
    grad: Tensor | None = None
    """Memory for the gradient, with the shape of `logits`; it may be `logits` itself. None without one."""
    target_logits: Tensor | None = None
    """(R,) float32, which replace the targets' raw logits if these were rounded to 16 bits; 0 for another rank's."""
    teacher: Tensor | None = None
    """(R, C) raw logits of a `Dense` teacher, of any float dtype."""
    input_checks: Tensor | None = None
    """(R,) int32: see `Loaded`."""


@dataclass(eq=False, slots=True)
class Loaded:
    """A part that is being computed; of a product with its hidden states (R, D) in the compute dtype."""

    part: Part
    hidden: Tensor = _NONE
    trained: Tensor = _NONE
    """The same, with 0 in rows without a gradient, so that a NaN there does not reach the classifier's gradient."""
    target_logits: Tensor | None = None
    """See `Block`. None if targets are not class indices, and if the compute dtype is float32 or float64."""
    input_checks: Tensor | None = None
    """(R,) int32: checksums of the caller's hidden states, in shards, from steps that compute them with `select`."""
    logits: Tensor | None = None
    """(R, C and padding) after the product."""
    grad: Tensor | None = None
    """The gradient of these, in the compute dtype."""


class Steps(Protocol):
    """The rows of one call on a device, their results, and the steps between logits and results."""

    deferred: Tensor | None
    """0-d: the remaining factor of the gradients of an `in_float16` forward pass; None for 1."""
    computes_all: bool = False
    """Whether products of a single part have all rows, also those that could be left out."""
    overlays: bool = False
    """Whether `whole_rows` can write a 16-bit gradient over the second half of the same row of float32 logits."""
    fuses: bool
    """Whether `whole_rows` serves this call, for rows whose logits are all in memory."""
    saves: bool
    """Whether the backward pass of this call takes the saved sums. If not, it calls `whole_rows` with upstreams."""
    tiles: bool = False
    """Whether rows without a gradient are folded from tiles of logits that are overwritten, instead of whole rows."""

    def partition(self) -> tuple[Tensor, Tensor] | None:
        """Return the rows (N,) int64, first those to compute, in order, and () int64: their number.

        The loop leaves out the others, whose results are 0. None if the host knows that there are none. Never called on
        an accelerator while a graph is traced or captured.
        """

    def select(self, source: Any, part: Part) -> Loaded:
        """Gather the hidden states of a part, and compute the logits of its targets on this rank.

        `source`, here and below, is a `xent.backends.torch.products.Classifier`. `trained` may be the hidden
        states themselves in a forward pass that computes no gradients (no copy is made then).
        """

    def whole_rows(self, block: Block, part: Part, saved: Tensor | None) -> None:
        """Fold and finish rows with all their classes: record results, and write the gradient to `block.grad`.

        Write the packed sums of these rows to `saved` (K, N), in the order of the call, if it is not None.
        """

    def fold(self, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
        """Write the sums of a block to `sums` (K, R) of its rows, or with `adds` merge them into it. C may be 0."""

    def fold_product(self, source: Any, loaded: Loaded, sums: Tensor) -> bool:
        """Write all sums (K, R) of a part from its hidden states, without storing logits. False if a device cannot."""
        return False

    def gradient_product(self, source: Any, loaded: Loaded, coefficients: Coefficients, grad: Tensor) -> bool:
        """Write the gradient (R, C and padding) of a part, but not its logits. False if a device cannot."""
        return False

    def begin_second_fold(self, sums: Tensor, part: Part) -> None:
        """Receive the sums of all ranks, (ranks, K, R), of the first fold of a part, which a dense teacher follows.

        A divergence needs the normalizers of both sides before its own sums. So until `finish`, `fold` writes the two
        sums of a second fold: the divergence, and that of its gradient.
        """

    def finish(self, sums: Tensor, part: Part, needs_gradient: bool, saved: Tensor | None) -> Coefficients:
        """Merge the sums of all ranks, (ranks, K, R), in rank order; record the results of a part in a forward pass.

        The merged sums have the same columns. They are written to `saved` (K, N), in the order of the call, if it is
        not None. With `needs_gradient` return the coefficients of the gradient, in any form: `gradient` gets them. A
        backward pass calls this with the saved sums, and records nothing.
        """

    def gradient(self, block: Block, part: Part, coefficients: Coefficients) -> None:
        """Write the gradient of a block's logits to `block.grad`. `coefficients` are those of the part."""

    def results(self) -> list[Tensor]:
        """Return the loss, then the statistics in the order of the options; those per row as (N,)."""


def columns(call: Call) -> tuple[str, ...]:
    """Return the names of the packed sums of a call."""
    options, target = call.options, call.target
    stats, checks = options.stats, ("check", "range") if call.shards is not None else ()
    if isinstance(target, (Dense, TopK)):
        names = ["peak", "rest", "mixed"] if "entropy" in stats else ["peak", "rest"] * isinstance(target, Dense)
        if isinstance(target, Dense):
            return (*names, "teacher_peak", "teacher_rest", "teacher_top", *checks)
        return (*names, "others_peak", "others_rest", *(f"known_{k}" for k in range(target.ids.shape[-1])), *checks)
    probabilities = isinstance(target, Probabilities)
    names = ["peak", "rest"]
    if probabilities:
        names += ["cost", "mass"]
        names += ["surprise", "given"] if "nll" in stats else []
        names += ["likely", "truth"] if "accuracy" in stats else []
    else:
        names += ["target"]
        names += ["row_weight"] if options.weight is not None else []
        names += ["below", "weights"] if smooths(options.label_smoothing) else []
    names += ["mixed"] if "entropy" in stats else []
    names += ["squares"] if "log_sum_sq_probs" in stats else []
    names += ["deficit", "counted"] if "mean_logit" in stats else []
    names += ["key", "place"] if "predictions" in stats or "accuracy" in stats else []
    return (*names, *checks)


def smooths(label_smoothing: Scalar) -> bool:
    """Return whether there is label smoothing: a number other than 0, or a tensor."""
    return differs(label_smoothing, 0)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, of per-row results and of the loss."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(call: Call) -> bool:
    """Return whether logits that the call computes must not be rounded to 16 bits."""
    return call.options.exact or not set(DIFFERENTIABLE).isdisjoint(call.options.stats)


STEPS: dict[str, Callable[[Setting], Steps]] = {}
"""Backend -> the function that starts the steps of a call."""

CONSTANTS: dict[str, Callable[[Any, Upstream | None], Any]] = {}
"""Backend -> its function (plan, which upstream gradients there are; None in a forward pass) that decides, once for a
plan, what does not depend on values. A backend without one decides nothing."""

COUNT_ABOVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
"""Backend -> its function (logits (R, C), those of the targets (R,)) that returns how many (R,) are larger. NaN is the
largest number, and nothing is larger than a target's NaN."""

LARGEST: dict[str, Callable[[Tensor, int, Activation], tuple[Tensor, Tensor, Tensor]]] = {}
"""Backend -> its function (logits (R, C), K, activation with a scale > 0) that returns the places (R, K) int64 of the K
largest logits, the largest first, the first among equals, these logits, and log sum_c exp(x_c - the largest x) (R,), 0
where all x are -inf. See `xent.backends.torch.top_k`."""

SCALES: dict[str, Callable[[list[Tensor], Tensor, Tensor | None, bool], list[Tensor]]] = {}
"""Backend -> function (gradients, upstream, `Steps.deferred`, in place) that scales gradients of a forward pass."""
