"""The steps of a call on NVIDIA GPUs: launches of Triton kernels. See `xent.backends.torch.contract.Steps`.

Whole rows take one launch. Rows of class targets can also be folded, finished and differentiated one by one.
Coefficients are (6, R) float32, see `finish_kernel`.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import SCALES, STEPS, Block, Part, Setting, Steps, Taken
from xent.backends.torch.memory import cast, is_dense
from xent.backends.torch.portable.facts import divided
from xent.backends.torch.portable.steps import PortableSteps
from xent.backends.triton import targets
from xent.backends.triton.geometry import Placed, in_blocks, placed, rows_of, sizes
from xent.backends.triton.hopper.products import fold_product, gradient_product
from xent.backends.triton.inputs import Inputs
from xent.backends.triton.kernels.beside import scale_kernel, take_kernel
from xent.backends.triton.kernels.divergence_kernel import FOLD, GRADIENT, REFOLD
from xent.backends.triton.kernels.fold import fold_kernel
from xent.backends.triton.kernels.rows_kernel import BOTH, GRADIENTS, SUMS, WORDS, gradient_kernel, rows_kernel
from xent.backends.triton.kernels.sums import finish_kernel
from xent.backends.triton.launches import Columns, Results, cdiv, is_interpreted, launch, next_power_of_2
from xent.backends.triton.machine import multiprocessors
from xent.core.call import Allowed, Classes, Dense, Probabilities

__all__ = ["ShardedSteps", "TritonSteps", "scale"]

_FIELDS = {"accuracy": "hits", "z_loss": "z_term"}
"""The members of `Results` that have other names than their statistics."""
# Multiprocessors of a GPU on which programs share rows. A launch has at most 7 programs that wait for others to start.
# So four launches in different streams leave room for one more program.
_LEAST = 32
_BLOCK_BYTES = 4096  # of the gradient, and of tiles
_GRADIENT_BLOCKS = 4  # blocks of a program
_GIVEN_BLOCK = 2048  # classes with probabilities
_FINISHED = 64  # rows of a program of `finish_kernel`
_SCALED = 4096  # elements of a block


class TritonSteps(Inputs):
    """The steps of a call, for all targets without shards, and for class targets in shards."""

    takes_any_strides = tiles = overlays = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.fuses = setting.call.shards is None
        self.deferred: Tensor | None = self.divided[2] if setting.narrow else None
        self.saves = isinstance(setting.call.target, Classes)
        self._skips = False

    @cached_property
    def recorded(self) -> Results:
        """The memory of the results that kernels record; None in a backward pass. Results of skipped rows are 0."""
        if self.setting.upstream is not None:
            return Results(None)
        names = [_FIELDS.get(name, name) for name in self.options.stats if name != "count"]
        return Results(**{name: self._each(name == "predictions") for name in ("loss", *names)})

    def _each(self, is_class: bool) -> Tensor:
        """Return memory for a result of rows."""
        dtype = torch.int64 if is_class else torch.float32
        if self._skips:
            return torch.full((self.count,), -1 if is_class else 0, dtype=dtype, device=self.device)
        return torch.empty(self.count, dtype=dtype, device=self.device)

    def partition(self, several: bool) -> tuple[Tensor | None, int | Tensor]:
        """Move the rows that must be computed to the front."""
        ids, weight, count = self.plain_rows.target, self.plain_rows.sample_weight, self.count
        on_host = self.device.type == "cpu"
        if not (on_host or (several and not torch.cuda.is_current_stream_capturing())):
            return None, count
        ids = None if ids is None else cast(ids, torch.int64)
        idle = torch.zeros(count, dtype=torch.bool, device=self.device) if ids is None else ids == self.ignore_index
        if weight is not None and not self.way.all_rows:
            unweighted = weight == 0
            idle |= unweighted if ids is None else unweighted & (ids >= 0) & (ids < self.limit)
        number = (~idle).sum()
        if on_host and int(number) == count:
            return None, count
        self._skips = True
        return idle.argsort(stable=True), int(number) if on_host else number

    def take(self, source: Any, part: Part) -> Taken:
        """Return the hidden states of a part and its target logits, in one launch."""
        target, (rows, start) = self.setting.call.target, self.rows_of(part)
        count, hidden, weight, bias = part.stop - part.start, source.hidden, source.weight, source.bias
        size = hidden.shape[1]
        rounded = source.compute.itemsize == 2 and isinstance(target, (Classes, Allowed))
        target_logits = torch.empty(count, dtype=torch.float32, device=self.device) if rounded else None
        trained = torch.empty(count, size, dtype=source.compute, device=self.device) if source.needs[1] else None
        if count and (rounded or trained is not None):
            launch(
                take_kernel,
                count,
                (
                    hidden,
                    *hidden.stride(),
                    weight,
                    *weight.stride(),
                    bias,
                    0 if bias is None else bias.stride(0),
                    trained,
                    target_logits,
                    rows,
                    start,
                    self.ignore_index,
                    self.limit,
                    self.setting.first,
                    self.setting.width,
                    size,
                ),
                {"STATISTICS": self.way.statistics, "BLOCK": min(next_power_of_2(max(size, 1)), 2048)},
                num_warps=4,
            )
        # Rows without a gradient still have statistics, which need their real hidden states.
        way = self.way
        apart = way.all_rows and not way.statistics and (rows.sample_weight is not None or rows.divisor is not None)
        taken = source.take(part) if trained is None or apart else trained
        return Taken(taken, taken if trained is None else trained, target_logits)

    @cached_property
    def given(self) -> tuple[Any, ...]:
        """The arguments of `rows_kernel` for class probabilities."""
        target = self.setting.call.target
        if not isinstance(target, Probabilities):
            return None, 0, 0, 0, 0, None
        values = target.values if rows_of(target.values) is not None else target.values.contiguous()
        likeliest = values.argmax(-1).view(-1) if self.recorded.hits is not None else None
        return values, *(rows_of(values) or ()), values.stride(-1), likeliest

    def whole_rows(self, block: Block, part: Part, saved: Tensor | None) -> None:
        """Fold and finish rows in one launch, and write their gradient."""
        if not isinstance(self.setting.call.target, (Classes, Probabilities)):
            targets.whole_rows(self, block, part)
            return
        for some in placed(block):
            if some.count:
                self._whole_rows(some, part, block.target_logits, saved)

    def _whole_rows(self, some: Placed, part: Part, target_logits: Tensor | None, saved: Tensor | None) -> None:
        recorded, vocabulary, half = self.recorded, self.setting.vocabulary, some.logits.itemsize == 2
        way = self.way._replace(
            entropy=self.way.tilted or recorded.entropy is not None or (saved is not None and self.columns.mixed >= 0),
            squared=recorded.log_sum_sq_probs is not None,
            averaged=recorded.mean_logit is not None,
            predicted=recorded.predictions is not None or recorded.hits is not None,
            exact=not half,
            quick=self.quick(half),
            folds=half and not self.way.tilted,
        )
        in_turn = is_interpreted(rows_kernel)
        shares = not way.smoothed and (in_turn or multiprocessors(self.device) >= _LEAST)
        if isinstance(self.setting.call.target, Probabilities):  # more sums need more registers
            saved, block = None, max(min(next_power_of_2(vocabulary), _GIVEN_BLOCK), 2 * some.vector)
            way, share, options = in_blocks(vocabulary, some, way, block, max(block // 256, 1))
        else:
            way, share, options = sizes(vocabulary, some, way, some.grad is not None, shares)
        programs, words = some.count * way.parts, None
        if way.parts > 1:
            words = torch.zeros(programs * WORDS + 1, dtype=torch.int64, device=self.device)
        rows, start = self.rows_of(part, some.start)
        columns = Columns() if saved is None else self.columns
        # Programs that run one after the other cannot wait for each other.
        for phase in (SUMS, GRADIENTS) if in_turn and words is not None else (BOTH,):
            launch(
                rows_kernel,
                programs,
                (
                    *some.memory,
                    target_logits,
                    saved,
                    words,
                    rows,
                    self.upstreams,
                    recorded,
                    self.numbers,
                    start,
                    self.count,
                    self.ignore_index,
                    vocabulary,
                    share,
                    *self.given,
                ),
                {"columns": columns, "way": way._replace(phase=phase)},
                **options,
            )

    def fold(self, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
        """See `xent.backends.torch.contract.Steps.fold`. One program per row."""
        setting, weight, columns = self.setting, self.plain_rows.class_weight, self.columns
        for some in placed(block):
            width, begin, itemsize = some.logits.shape[-1], some.start - block.start, some.logits.itemsize
            way = self.way._replace(
                entropy=columns.mixed >= 0,
                squared=columns.squares >= 0,
                averaged=columns.deficit >= 0,
                predicted=columns.key >= 0,
                quick=self.quick(itemsize == 2),
            )
            if 0 < width < setting.width:
                way, _, options = in_blocks(width, some, way, _BLOCK_BYTES // itemsize, 4)
            else:
                way, _, options = sizes(max(width, 1), some, way, False, False)
            rows, first = self.rows_of(part, some.start)
            if weight is not None:
                own = weight[block.first : block.first + width]
                rows = rows._replace(class_weight=own, total_weight=own.sum() if way.smoothed else None)
            found = sums[:, begin : begin + some.count]
            launch(
                fold_kernel,
                some.count,
                (
                    some.logits,
                    *some.rows,
                    some.skew,
                    found,
                    found.stride(0),
                    None if block.target_logits is None else block.target_logits[begin : begin + some.count],
                    rows,
                    self.numbers,
                    first,
                    self.ignore_index,
                    setting.first + block.first,
                    width,
                    setting.vocabulary,
                ),
                {
                    "columns": columns,
                    "way": way,
                    "COLUMNS": len(sums),
                    "ADDS": adds,
                },
                **options,
            )

    def finish(self, sums: Tensor, part: Part, wanted: bool, saved: Tensor | None) -> Tensor | None:
        """See `xent.backends.torch.contract.Steps.finish`."""
        ranks, _, count = sums.shape
        made = torch.empty(6, count, dtype=torch.float32, device=sums.device) if wanted else None
        rows, first = self.rows_of(part)
        if count:
            launch(
                finish_kernel,
                cdiv(count, _FINISHED),
                (
                    sums,
                    sums.stride(0),
                    ranks,
                    count,
                    rows,
                    self.upstreams,
                    self.recorded,
                    self.numbers,
                    first,
                    saved,
                    0 if saved is None else saved.stride(0),
                    made,
                    self.ignore_index,
                    self.setting.first,
                    self.setting.width,
                    self.setting.vocabulary,
                ),
                {"columns": self.columns, "way": self.way, "BLOCK": _FINISHED},
                num_warps=2,
            )
        return made

    def gradient(self, block: Block, part: Part, coefficients: Tensor) -> None:
        """See `xent.backends.torch.contract.Steps.gradient`. One program per part of a row."""
        for some in placed(block):
            width, vector, itemsize = some.logits.shape[-1], some.vector, some.logits.itemsize
            if not width:
                continue
            size = max(min(next_power_of_2(width), _BLOCK_BYTES // itemsize), 2 * vector)
            blocks = max(min(_GRADIENT_BLOCKS, cdiv(width, size)), 1)
            rows, first = self.rows_of(part, some.start)
            if rows.class_weight is not None:
                rows = rows._replace(class_weight=rows.class_weight[block.first :])
            launch(
                gradient_kernel,
                some.count * cdiv(width + (vector - 1 if some.skewed else 0), blocks * size),
                (
                    *some.memory,
                    coefficients[:, some.start :],
                    coefficients.stride(0),
                    rows,
                    self.numbers,
                    first,
                    block.first,
                    width,
                ),
                {
                    "way": self.way._replace(quick=self.quick(itemsize == 2), block=size, **some.constants()),
                    "BLOCKS": blocks,
                },
                num_warps=max(size * itemsize // 1024, 1),
                maxnreg=64,
                **some.options(),
            )

    fold_product, gradient_product = fold_product, gradient_product

    def meet(self, sums: Tensor) -> None:
        """Do nothing: these targets take one round of folds."""

    def results(self) -> list[Tensor]:
        """Return the loss and the statistics."""
        options, found = self.options, {**self.recorded._asdict(), "count": self.counted}
        divisor = self.rows.divisor[0] if self.mean else None
        for name in ("loss", "z_term") if options.reduction != "none" else ():
            found[name] = None if found[name] is None else divided(found[name].sum(), divisor)
        if found["hits"] is not None and not options.accuracy_of_rows:
            found["hits"] = found["hits"].sum() / found["count"].clamp(min=1)
        return [found[_FIELDS.get(name, name)] for name in ("loss", *options.stats)]


def scale(grads: list[Tensor], upstream: Tensor, deferred: Tensor | None, inplace: bool) -> list[Tensor]:
    """Return gradients that were computed in the forward pass times 0-d factors, rounded once.

    They are scaled in their own memory with `inplace`.
    """
    made = []
    for grad in grads:
        out = grad if inplace else torch.empty_like(grad)
        place: tuple[int, int, int] | None = (1, 0, 0)
        rows, length = 1, grad.numel()
        if not is_dense(grad):
            place = rows_of(grad) if inplace and grad.stride(-1) == 1 else None
            rows, length = grad.shape[:-1].numel(), grad.shape[-1]
        if place is None:  # a 1-d factor, because PyTorch rounds a 0-d factor to the gradient's dtype first
            out.copy_(grad * (upstream if deferred is None else upstream * deferred).reshape(1))
        elif grad.numel():
            blocks = rows * cdiv(length, _SCALED)
            launch(
                scale_kernel,
                min(blocks, 4 * multiprocessors(grad.device)),
                (grad, *place, out, upstream, deferred, rows, length),
                {"GROUPED": place[0] < rows, "INPLACE": inplace, "BLOCK": _SCALED},
                num_warps=8,
            )
        made.append(out)
    return made


_MERGED = "peak", "rest", "teacher_peak", "teacher_rest", "teacher_top"


class _ShardedInputs(Inputs):
    """The rows of a divergence in shards, whose kernel records nothing."""

    recorded = Results(None)


class ShardedSteps(PortableSteps):
    """The steps of a dense teacher's divergence in shards: each fold, and the gradient, in one launch."""

    overlays = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._inputs, self._width = _ShardedInputs(setting), setting.width

    def fold(self, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
        """Write the sums of a block."""
        if self._width:
            merged = _stacked(self.met, _MERGED) if self.met else None
            step = FOLD if merged is None else REFOLD
            targets.shard(self._inputs, block._replace(grad=None), part, step, sums, merged)
        else:
            super().fold(block, part, sums, adds)

    def gradient(self, block: Block, part: Part, coefficients: Any) -> None:
        """Write the gradient of a block's logits."""
        if self._width:
            targets.shard(self._inputs, block, part, GRADIENT, None, _stacked(coefficients, (*_MERGED, "pull")))


def _stacked(sums: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    return torch.stack([sums[name] for name in names])


def _start(setting: Setting) -> Steps:
    call = setting.call
    if isinstance(call.target, Classes) or targets.serves(setting):
        return TritonSteps(setting)
    if isinstance(call.target, Dense) and not isinstance(call.options.beta, Tensor):
        return ShardedSteps(setting)
    return PortableSteps(setting)


STEPS["triton"] = _start
SCALES["triton"] = scale
