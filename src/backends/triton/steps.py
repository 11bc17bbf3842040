"""The steps of a call on NVIDIA GPUs: launches of Triton kernels. See `xent.backends.torch.contract.Steps`.

Whole rows take one launch. Rows of class targets can also be folded, finished and differentiated one by one.
Coefficients are (6, R) float32, see `finish_kernel`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import SCALES, STEPS, Block, Loaded, Part, Setting, Steps
from xent.backends.torch.memory import is_dense
from xent.backends.torch.portable.steps import PortableSteps
from xent.backends.torch.shards.checks import range_check
from xent.backends.triton import targets
from xent.backends.triton.geometry import Placed, Strides, in_blocks, placed, rows_of, sizes
from xent.backends.triton.hopper.products import fold_product, gradient_product
from xent.backends.triton.inputs import Inputs
from xent.backends.triton.kernels.fold import fold_kernel
from xent.backends.triton.kernels.rows_kernel import TAG, WORDS, gradient_kernel, rows_kernel
from xent.backends.triton.kernels.sums import finish_kernel, partition_kernel, scale_kernel, select_kernel
from xent.backends.triton.launches import (
    Columns,
    Kernel,
    Launch,
    Results,
    Rows,
    Upstreams,
    Way,
    absent,
    cdiv,
    is_interpreted,
    next_power_of_2,
    no_results,
)
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
_PARTITIONED = 4096  # rows of a block
_SCALED = 4096  # elements of a block
_SCALE = Launch(scale_kernel, {"BLOCK": _SCALED}, num_warps=8)
_NOT_GIVEN = (None, 0, 0, 0, 0, None)


class TritonSteps:
    """The steps of a call, for all targets without shards, and for class targets in shards."""

    computes_all = tiles = overlays = True

    def __init__(self, setting: Setting) -> None:
        self.setting, self.inputs = setting, Inputs(setting)
        inputs = self.inputs
        divisor = inputs.rows.divisor
        self.fuses = setting.call.shards is None
        self.deferred = divisor[2] if setting.in_float16 and divisor is not None else None
        self.saves = isinstance(setting.call.target, Classes)
        memory = {
            name: torch.empty(inputs.count, dtype=dtype, device=inputs.device)
            for name, dtype in inputs.decisions.recorded
        }
        inputs.recorded = no_results(inputs.device, inputs.decisions.known)._replace(**memory)

    def partition(self) -> tuple[Tensor, Tensor]:
        """Return the partition of rows, in one launch, which also writes the results of those to leave out."""
        inputs = self.inputs
        order = torch.empty(inputs.count, dtype=torch.int64, device=inputs.device)
        counted = torch.empty((), dtype=torch.int64, device=inputs.device)
        self.launch("partition", partition_kernel, {"BLOCK": _PARTITIONED}, num_warps=16)(
            *(inputs.kind, 1, inputs.rows, inputs.recorded, order, counted),
            *(inputs.count, inputs.ignore_index, inputs.limit, int(inputs.decisions.all_rows)),
        )
        return order, counted

    def select(self, source: Any, part: Part) -> Loaded:
        """Return the hidden states of a part and its target logits, in one launch."""
        inputs = self.inputs
        target, (rows, start, kind) = self.setting.call.target, inputs.rows_of(part, counts=True)
        count, hidden, weight, bias = part.stop - part.start, source.hidden, source.weight, source.bias
        size = hidden.shape[1]
        rounded = source.compute.itemsize == 2 and isinstance(target, (Classes, Allowed)) and weight is not None
        target_logits = torch.empty(count, dtype=torch.float32, device=inputs.device) if rounded else None
        checks, shards = None, self.setting.call.shards
        if shards is not None and shards.axis is None and self.setting.upstream is None:
            checks = torch.empty(count, dtype=torch.int32, device=inputs.device)
        trained = torch.empty(count, size, dtype=source.compute, device=inputs.device) if source.needs[1] else None
        if count and (rounded or trained is not None or checks is not None):
            constants = {"BLOCK": min(next_power_of_2(max(size, 1)), 2048)}
            self.launch("select", select_kernel, constants, num_warps=4)(
                *(kind, count, hidden, *hidden.stride(), weight, *weight.stride()),
                *(absent(inputs.device) if bias is None else bias.contiguous(), trained, target_logits, checks),
                *(rows._replace(class_weight=None, total_weight=None), start, inputs.ignore_index, inputs.limit),
                *(self.setting.first, self.setting.width, size, int(inputs.decisions.statistics)),
            )
        # Rows without a gradient still have statistics, which need their real hidden states.
        apart = inputs.stats and (inputs.options.sample_weight is not None or inputs.has_divisor)
        hidden = source.select(part) if trained is None or apart else trained
        return Loaded(part, hidden, hidden if trained is None else trained, target_logits, checks)

    def _probabilities(self) -> tuple[object, ...]:
        """Return the arguments of `rows_kernel` for class probabilities."""
        target = self.setting.call.target
        if not isinstance(target, Probabilities):
            return _NOT_GIVEN
        probs = target.probs if rows_of(target.probs) is not None else target.probs.contiguous()
        likeliest = probs.argmax(-1).view(-1) if self.inputs.recorded.accuracy is not None else None
        return probs, *(rows_of(probs) or ()), probs.stride(-1), likeliest

    def whole_rows(self, block: Block, part: Part, saved: Tensor | None) -> None:
        """Fold and finish rows in one launch, and write their gradient."""
        inputs = self.inputs
        if not isinstance(self.setting.call.target, (Classes, Probabilities)):
            targets.whole_rows(inputs, block, part)
            return
        width, in_turn, probabilities = self.setting.vocabulary, is_interpreted(rows_kernel), self._probabilities()
        if probabilities is not _NOT_GIVEN:
            saved = None
        upstreams, recorded, plain = inputs.upstreams, inputs.recorded, inputs.plain and part.rows is None
        if plain:  # without the branches of null pointers, the losses of short rows take 3 to 5% less time
            upstreams, recorded = Upstreams(upstreams.loss), Results(recorded.loss)
        for piece in placed(block):
            prepared, share, parts = self._of_whole_rows(piece, saved is not None, in_turn, plain)
            programs, words = piece.number * parts, None
            if parts > 1:
                words = torch.zeros(programs * WORDS + 1, dtype=torch.int64, device=inputs.device)
            rows, start, kind = inputs.rows_of(part, piece.start, counts=True)
            if plain:
                rows = Rows(rows.target, divisor=rows.divisor)
            # Programs that run one after the other cannot wait for each other.
            for grad in (None, piece.grad) if in_turn and words is not None else (piece.grad,):
                if in_turn and words is not None:
                    words |= TAG
                    words[-1] = 0
                prepared(
                    *(kind, programs, piece.logits, *piece.rows, piece.skew, grad, *piece.places),
                    *(block.target_logits, saved, words, rows, upstreams),
                    *(recorded, inputs.numbers, start, inputs.count, int(inputs.counts)),
                    *(inputs.ignore_index, width, share, *probabilities),
                )

    def _of_whole_rows(self, piece: Placed, saves: bool, in_turn: bool, plain: bool) -> tuple[Launch, int, int]:
        """Return the launch of `rows_kernel`, the classes of a program, and the programs that share a row."""
        inputs = self.inputs
        itemsize, launches = piece.logits.itemsize, inputs.decisions.launches
        half, writes, width = itemsize == 2, piece.grad is not None, self.setting.vocabulary
        quick = inputs.quick(half)
        key = "rows", piece.layout, itemsize, writes, saves, quick, plain
        if key not in launches:
            more = {"exact": not half, "quick": quick, "scaled": inputs.decisions.scaled}
            if isinstance(self.setting.call.target, Probabilities):  # more sums need more registers
                size = min(next_power_of_2(width), _GIVEN_BLOCK)
                way, share, options = in_blocks(width, piece, inputs.way, size, max(size // 256, 1), **more)
            else:
                shares = not inputs.way.smoothed and (in_turn or multiprocessors(inputs.device) >= _LEAST)
                way, share, options = sizes(width, piece, inputs.way, writes, shares, **more)
            constants = {"columns": inputs.columns if saves else Columns(), "way": way}
            launches[key] = Launch(rows_kernel, constants, **options), share, way.parts
        prepared: tuple[Launch, int, int] = launches[key]
        return prepared

    def fold(self, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
        """See `xent.backends.torch.contract.Steps.fold`. One program per row."""
        inputs = self.inputs
        setting, weight = self.setting, None if inputs.options.weight is None else inputs.rows.class_weight
        for piece in placed(block):
            width = piece.logits.shape[-1]
            rows, first, kind = inputs.rows_of(part, piece.start)
            if weight is not None:
                own = weight[block.first : block.first + width]
                kind = kind, own.data_ptr() % 16 == 0
                rows = rows._replace(class_weight=own, total_weight=own.sum() if inputs.way.smoothed else None)
            row_slice = slice(piece.start - block.start, piece.start - block.start + piece.number)
            target_logits = None if block.target_logits is None else block.target_logits[row_slice]
            input_checks = None if block.input_checks is None else block.input_checks[row_slice]
            self._of_fold(piece, width)(
                *(kind, piece.number, piece.logits, *piece.rows, piece.skew, sums[:, row_slice], sums.stride(0)),
                *(target_logits, input_checks, rows, inputs.numbers, first, inputs.ignore_index),
                *(setting.first + block.first, width, setting.vocabulary),
                *(range_check(setting.first, setting.first + setting.width), int(adds)),
            )

    def _of_fold(self, piece: Placed, width: int) -> Launch:
        """Return the launch of `fold_kernel` for rows of `width` classes."""
        inputs = self.inputs
        itemsize, launches = piece.logits.itemsize, inputs.decisions.launches
        quick, whole = inputs.quick(itemsize == 2), not 0 < width < self.setting.width
        block, vocabulary = _BLOCK_BYTES // itemsize, max(self.setting.width, 1)
        classes = vocabulary if whole or width > block else block  # of a row: the last tile may have fewer
        key = "fold", piece.layout, itemsize, whole, classes, quick
        if key not in launches:
            if whole:
                way, _, options = sizes(classes, piece, inputs.way, False, False, quick=quick)
            else:
                way, _, options = in_blocks(classes, piece, inputs.way, block, 4, quick=quick)
            launches[key] = Launch(fold_kernel, {"columns": inputs.columns, "way": way}, **options)
        prepared: Launch = launches[key]
        return prepared

    def finish(self, sums: Tensor, part: Part, needs_gradient: bool, saved: Tensor | None) -> Tensor | None:
        """See `xent.backends.torch.contract.Steps.finish`."""
        inputs = self.inputs
        ranks, _, count = sums.shape
        coefficients = torch.empty(6, count, dtype=torch.float32, device=sums.device) if needs_gradient else None
        rows, first, kind = inputs.rows_of(part)
        if count:
            nothing, way = (
                absent(inputs.device),
                Way(inputs.way.capped, smoothed=inputs.way.smoothed, of_entropy=inputs.columns.mixed >= 0),
            )
            constants = {"columns": inputs.columns, "way": way, "BLOCK": _FINISHED}
            self.launch("finish", finish_kernel, constants, num_warps=2)(
                *(kind, cdiv(count, _FINISHED), sums, sums.stride(0), ranks, count, rows, inputs.upstreams),
                *(inputs.recorded, inputs.numbers, first),
                *((nothing, 0) if saved is None else (saved, saved.stride(0))),
                nothing if coefficients is None else coefficients,
                *(inputs.ignore_index, self.setting.first, self.setting.width, self.setting.vocabulary),
                range_check(0, self.setting.vocabulary),
            )
        return coefficients

    def gradient(self, block: Block, part: Part, coefficients: Tensor) -> None:
        """See `xent.backends.torch.contract.Steps.gradient`. One program per part of a row."""
        inputs = self.inputs
        width = block.logits.shape[-1]
        for piece in placed(block) if width else ():
            prepared, share = self._of_gradient(piece, width)
            rows, first, kind = inputs.rows_of(part, piece.start)
            own = rows.class_weight
            if own is not None and inputs.options.weight is not None:
                own = own[block.first :]
                kind = kind, own.data_ptr() % 16 == 0
            rows = rows._replace(target=None, class_weight=own, total_weight=None)
            layout = piece.layout
            prepared(
                *(kind, piece.number * cdiv(width + (layout.vector - 1 if layout.skewed else 0), share)),
                *(piece.logits, *piece.rows, piece.skew, piece.grad, *piece.places),
                *(coefficients[:, piece.start :], coefficients.stride(0), rows, inputs.numbers),
                *(first, block.first, width),
            )

    def _of_gradient(self, piece: Placed, width: int) -> tuple[Launch, int]:
        """Return the launch of `gradient_kernel` for rows of `width` classes, and the classes of a program."""
        inputs = self.inputs
        itemsize, layout, launches = piece.logits.itemsize, piece.layout, inputs.decisions.launches
        quick = inputs.quick(itemsize == 2)
        key = "gradient", layout, itemsize, width, quick
        if key not in launches:
            size = max(min(next_power_of_2(width), _BLOCK_BYTES // itemsize), 2 * layout.vector)
            blocks = max(min(_GRADIENT_BLOCKS, cdiv(width, size)), 1)
            own, geometry = inputs.way, layout._asdict() | {"block": size}
            way = Way(own.capped, smoothed=own.smoothed, of_entropy=own.of_entropy, quick=quick, **geometry)
            options: dict[str, object] = {"num_warps": max(size * itemsize // 1024, 1), "maxnreg": 64}
            constants = {"way": way, "BLOCKS": blocks}
            options |= {"enable_fp_fusion": not layout.skewed}
            launches[key] = Launch(gradient_kernel, constants, **options), blocks * size
        prepared: tuple[Launch, int] = launches[key]
        return prepared

    def launch(self, key: object, function: Kernel, constants: Mapping[str, object], **options: object) -> Launch:
        """Return the launch of a kernel whose constants are the same in all calls of a plan with this key."""
        launches = self.inputs.decisions.launches
        if key not in launches:
            launches[key] = Launch(function, constants, **options)
        prepared: Launch = launches[key]
        return prepared

    fold_product, gradient_product = fold_product, gradient_product

    def begin_second_fold(self, sums: Tensor, part: Part) -> None:
        """Do nothing: these targets take one round of folds."""

    def results(self) -> list[Tensor]:
        """Return the loss and the statistics."""
        inputs = self.inputs
        recorded: Any = inputs.recorded
        options, reduced = inputs.options, inputs.options.reduction != "none"
        results = [recorded.loss.sum() if reduced else recorded.loss]
        for name in options.stats:
            result: Any = inputs.counted if name == "count" else getattr(recorded, name, None)
            if name == "z_loss" and reduced:
                result = result.sum()
            elif name == "accuracy" and not options.is_log_probs:
                assert inputs.counted is not None
                result = result.sum() / inputs.counted.clamp(min=1)
            results.append(result)
        return results


def scale(grads: list[Tensor], upstream: Tensor, deferred: Tensor | None, inplace: bool) -> list[Tensor]:
    """Return gradients that were computed in the forward pass times 0-d factors, rounded once.

    They are scaled in their own memory with `inplace`. Two that fill their memory take one launch.
    """
    scaled = grads if inplace else [grad.clone() for grad in grads]
    waiting: Tensor | None = None
    for grad in scaled:
        if not is_dense(grad):
            for piece in placed(Block(grad, grad=grad)):
                _scale_rows(piece.logits, piece.rows, piece.number, piece.logits.shape[-1], None, upstream, deferred)
        elif waiting is None:
            waiting = grad
        else:
            _scale_rows(waiting, (1, 0, 0), 1, waiting.numel(), grad, upstream, deferred)
            waiting = None
    if waiting is not None:
        _scale_rows(waiting, (1, 0, 0), 1, waiting.numel(), None, upstream, deferred)
    return scaled


def _scale_rows(
    first: Tensor,
    rows: Strides,
    count: int,
    length: int,
    second: Tensor | None,
    upstream: Tensor,
    deferred: Tensor | None,
) -> None:
    """Scale `count` rows of `length` elements, and a second tensor that fills its memory, in one launch."""
    more = 0 if second is None else second.numel()
    blocks = count * cdiv(length, _SCALED) + cdiv(more, _SCALED)
    if blocks:
        device = first.device
        dtypes = [None if tensor is None else tensor.dtype for tensor in (first, second, upstream, deferred)]
        _SCALE(
            *((device, *dtypes), min(blocks, 4 * multiprocessors(device)), first, *rows, second, upstream, deferred),
            *(count, length, more),
        )


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
