"""The steps of a call on NVIDIA GPUs: launches of Triton kernels. See `xent.backends.torch.contract.Steps`.

Whole rows take one launch. Rows of class targets can also be folded, finished and differentiated one by one.
Coefficients are (6, R) float32, see `finish_kernel`.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import SCALES, STEPS, Block, Part, Selected, Setting, Steps
from xent.backends.torch.memory import cast, is_dense
from xent.backends.torch.portable.steps import PortableSteps
from xent.backends.triton import targets
from xent.backends.triton.geometry import in_blocks, placed, rows_of, sizes
from xent.backends.triton.hopper.products import fold_product, gradient_product
from xent.backends.triton.inputs import Inputs
from xent.backends.triton.kernels.fold import fold_kernel
from xent.backends.triton.kernels.rows_kernel import TAG, WORDS, gradient_kernel, rows_kernel
from xent.backends.triton.kernels.sums import finish_kernel, scale_kernel, select_kernel
from xent.backends.triton.launches import Columns, Results, cdiv, is_interpreted, launch, next_power_of_2
from xent.backends.triton.machine import multiprocessors
from xent.core.call import Allowed, Classes, Dense, Probabilities, TopK

__all__ = ["TritonSteps", "scale"]

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
        self.deferred: Tensor | None = self.rows.divisor[2] if setting.in_float16 else None
        self.saves = isinstance(setting.call.target, Classes)
        self._skips = False

    @cached_property
    def recorded(self) -> Results:  # type: ignore[override]
        """The memory of the results; a backward pass has none. Results of skipped rows are 0."""
        made: dict[str, Tensor] = {}
        for name in ("loss", *self.stats) if self.setting.upstream is None else ():
            fill, dtype = (-1, torch.int64) if name == "predictions" else (0, torch.float32)
            if name != "count":
                one = torch.empty(self.count, dtype=dtype, device=self.device)
                made[name] = one.fill_(fill) if self._skips else one
        return Results(**made)

    def skippable(self) -> Tensor:
        """Return the rows to leave out, whose results are set before."""
        ids, weight = self.rows.target, self.rows.sample_weight
        skippable = torch.zeros(self.count, dtype=torch.bool, device=self.device)
        valid = ~skippable
        if ids is not None:
            ids = cast(ids, torch.int64)
            skippable, valid = ids == self.ignore_index, (ids >= 0) & (ids < self.limit)
        if weight is not None and not self.way.all_rows:
            skippable |= (weight == 0) & valid
        self._skips = True
        return skippable

    def select(self, source: Any, part: Part) -> Selected:
        """Return the hidden states of a part and its target logits, in one launch."""
        target, (rows, start) = self.setting.call.target, self.rows_of(part)
        count, hidden, weight, bias = part.stop - part.start, source.hidden, source.weight, source.bias
        size = hidden.shape[1]
        rounded = source.compute.itemsize == 2 and isinstance(target, (Classes, Allowed)) and weight is not None
        target_logits = torch.empty(count, dtype=torch.float32, device=self.device) if rounded else None
        trained = torch.empty(count, size, dtype=source.compute, device=self.device) if source.needs[1] else None
        if count and (rounded or trained is not None):
            launch(
                select_kernel,
                count,
                (
                    *(hidden, *hidden.stride(), weight, *weight.stride(), None if bias is None else bias.contiguous()),
                    *(trained, target_logits, rows, start, self.ignore_index, self.limit),
                    *(self.setting.first, self.setting.width, size),
                ),
                {"STATISTICS": self.way.statistics, "BLOCK": min(next_power_of_2(max(size, 1)), 2048)},
                num_warps=4,
            )
        # Rows without a gradient still have statistics, which need their real hidden states.
        apart = self.stats and (rows.sample_weight is not None or rows.divisor is not None)
        selected = source.select(part) if trained is None or apart else trained
        return Selected(selected, selected if trained is None else trained, target_logits)

    @cached_property
    def given(self) -> tuple[Any, ...]:
        """The arguments of `rows_kernel` for class probabilities."""
        target = self.setting.call.target
        if not isinstance(target, Probabilities):
            return None, 0, 0, 0, 0, None
        values = target.values if rows_of(target.values) is not None else target.values.contiguous()
        likeliest = values.argmax(-1).view(-1) if self.recorded.accuracy is not None else None
        return values, *(rows_of(values) or ()), values.stride(-1), likeliest

    def whole_rows(self, block: Block, part: Part, saved: Tensor | None) -> None:
        """Fold and finish rows in one launch, and write their gradient."""
        if not isinstance(self.setting.call.target, (Classes, Probabilities)):
            targets.whole_rows(self, block, part)
            return
        recorded, width, in_turn = self.recorded, self.setting.vocabulary, is_interpreted(rows_kernel)
        shares = not self.way.smoothed and (in_turn or multiprocessors(self.device) >= _LEAST)
        for some in placed(block):
            half, words = some.logits.itemsize == 2, None
            more = {"exact": not half, "quick": self.quick(half), "folds": half and not self.way.of_entropy}
            if isinstance(self.setting.call.target, Probabilities):  # more sums need more registers
                saved, size = None, min(next_power_of_2(width), _GIVEN_BLOCK)
                way, share, options = in_blocks(width, some, self.way, size, max(size // 256, 1), **more)
            else:
                way, share, options = sizes(width, some, self.way, some.grad is not None, shares, **more)
            programs = some.number * way.parts
            if way.parts > 1:
                words = torch.zeros(programs * WORDS + 1, dtype=torch.int64, device=self.device)
            rows, start = self.rows_of(part, some.start)
            # Programs that run one after the other cannot wait for each other.
            for grad in (None, some.grad) if in_turn and words is not None else (some.grad,):
                if in_turn and words is not None:
                    words |= TAG
                    words[-1] = 0
                launch(
                    rows_kernel,
                    programs,
                    (
                        *(some.logits, *some.rows, some.skew, grad, *some.places, block.target_logits, saved, words),
                        *(rows, self.upstreams, recorded, self.numbers, start, self.count, self.ignore_index),
                        *(width, share, *self.given),
                    ),
                    {"columns": Columns() if saved is None else self.columns, "way": way},
                    **options,
                )

    def fold(self, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
        """See `xent.backends.torch.contract.Steps.fold`. One program per row."""
        setting, weight = self.setting, self.rows.class_weight
        for some in placed(block):
            width, itemsize = some.logits.shape[-1], some.logits.itemsize
            quick = self.quick(itemsize == 2)
            if 0 < width < setting.width:
                way, _, options = in_blocks(width, some, self.way, _BLOCK_BYTES // itemsize, 4, quick=quick)
            else:
                way, _, options = sizes(max(width, 1), some, self.way, False, False, quick=quick)
            rows, first = self.rows_of(part, some.start)
            if weight is not None:
                own = weight[block.first : block.first + width]
                rows = rows._replace(class_weight=own, total_weight=own.sum() if way.smoothed else None)
            here = slice(some.start - block.start, some.start - block.start + some.number)
            target_logits = None if block.target_logits is None else block.target_logits[here]
            launch(
                fold_kernel,
                some.number,
                (
                    *(some.logits, *some.rows, some.skew, sums[:, here], sums.stride(0), target_logits),
                    *(rows, self.numbers, first, self.ignore_index),
                    *(setting.first + block.first, width, setting.vocabulary),
                ),
                {"columns": self.columns, "way": way, "ADDS": adds},
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
                    *(sums, sums.stride(0), ranks, count, rows, self.upstreams, self.recorded, self.numbers, first),
                    *(saved, 0 if saved is None else saved.stride(0), made, self.ignore_index),
                    *(self.setting.first, self.setting.width, self.setting.vocabulary),
                ),
                {"columns": self.columns, "way": self.way, "BLOCK": _FINISHED},
                num_warps=2,
            )
        return made

    def gradient(self, block: Block, part: Part, coefficients: Tensor) -> None:
        """See `xent.backends.torch.contract.Steps.gradient`. One program per part of a row."""
        width = block.logits.shape[-1]
        for some in placed(block) if width else ():
            vector, itemsize, skewed = some.layout["vector"], some.logits.itemsize, some.layout["skewed"]
            size = max(min(next_power_of_2(width), _BLOCK_BYTES // itemsize), 2 * vector)
            blocks = max(min(_GRADIENT_BLOCKS, cdiv(width, size)), 1)
            rows, first = self.rows_of(part, some.start)
            if rows.class_weight is not None:
                rows = rows._replace(class_weight=rows.class_weight[block.first :])
            way = self.way._replace(quick=self.quick(itemsize == 2), block=size, **some.layout)
            launch(
                gradient_kernel,
                some.number * cdiv(width + (vector - 1 if skewed else 0), blocks * size),
                (
                    *(some.logits, *some.rows, some.skew, some.grad, *some.places),
                    *(coefficients[:, some.start :], coefficients.stride(0), rows, self.numbers),
                    *(first, block.first, width),
                ),
                {"way": way, "BLOCKS": blocks},
                num_warps=max(size * itemsize // 1024, 1),
                maxnreg=64,
                enable_fp_fusion=not skewed,
            )

    fold_product, gradient_product = fold_product, gradient_product

    def meet(self, sums: Tensor) -> None:
        """Do nothing: these targets take one round of folds."""

    def results(self) -> list[Tensor]:
        """Return the loss and the statistics."""
        options, found = self.options, {**self.recorded._asdict(), "count": self.counted}
        for name in ("loss", "z_loss") if options.reduction != "none" else ():
            found[name] = None if found[name] is None else found[name].sum()
        if found["accuracy"] is not None and not options.accuracy_of_rows:
            found["accuracy"] = found["accuracy"].sum() / found["count"].clamp(min=1)
        return [found[name] for name in ("loss", *options.stats)]


def scale(grads: list[Tensor], upstream: Tensor, deferred: Tensor | None, inplace: bool) -> list[Tensor]:
    """Return gradients that were computed in the forward pass times 0-d factors, rounded once.

    They are scaled in their own memory with `inplace`.
    """
    made = [grad if inplace else grad.clone() for grad in grads]
    for grad in made:
        whole = grad.as_strided((1, grad.numel()), (1, 1)) if is_dense(grad) else grad
        length = whole.shape[-1]
        for some in placed(Block(whole, grad=whole)) if grad.numel() else ():
            launch(
                scale_kernel,
                min(some.number * cdiv(length, _SCALED), 4 * multiprocessors(grad.device)),
                (some.logits, *some.rows, upstream, deferred, some.number, length),
                {"BLOCK": _SCALED},
                num_warps=8,
            )
    return made


def _start(setting: Setting) -> Steps:
    call = setting.call
    if not isinstance(call.options.beta, Tensor):
        rare = isinstance(call.target, TopK) and call.options.kind == "tv"
        if isinstance(call.target, Classes) or (call.shards is None and not rare):
            return TritonSteps(setting)
        if isinstance(call.target, Dense):
            return targets.ShardedSteps(setting)
    return PortableSteps(setting)


STEPS["triton"] = _start
SCALES["triton"] = scale
