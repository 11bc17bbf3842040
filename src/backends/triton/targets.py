"""Launches for targets that have their own kernels: supports, and the teachers of divergences."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Coefficients, Part, Setting
from xent.backends.torch.memory import RowView, block_rows
from xent.backends.torch.portable.facts import Index, tolerance
from xent.backends.torch.portable.steps import PortableSteps
from xent.backends.triton.geometry import Placed, placed
from xent.backends.triton.inputs import Inputs, floats_of
from xent.backends.triton.kernels.classes_kernels import support_kernel, top_k_kernel
from xent.backends.triton.kernels.divergence_kernel import FOLD, GRADIENT, REFOLD, WHOLE, divergence_kernel
from xent.backends.triton.launches import Kernel, Numbers, Way, cdiv, launch, next_power_of_2, no_rows
from xent.core.call import Allowed, Dense, Given, TopK

__all__ = ["ShardedSteps", "whole_rows"]

_ELEMENTS_PER_WARP = 256
_MERGED = "peak", "rest", "teacher_peak", "teacher_rest", "teacher_top", "pull"


def whole_rows(inputs: Inputs, block: Block, part: Part) -> None:
    """Fold and finish the rows of a block. Write their gradient if `block.grad` is not None."""
    target, rows = inputs.setting.call.target, placed(block)
    more: tuple[object, ...]
    if isinstance(target, Dense):
        for piece in rows:
            _launch_dense(inputs, block, piece, part, WHOLE, (None, 0, None, 0))
    elif isinstance(target, TopK):
        if isinstance(inputs.setting.call.source, Given):  # the kernel may overwrite logits
            grad = block.grad
            rows = _copied(block) if grad is None else placed(block._replace(logits=grad.copy_(block.logits)))
        width = target.ids.shape[1]
        constants = {"WIDTH": next_power_of_2(width)}
        tails = int(target.tail == "bucket"), int(target.tail == "renormalize")
        for piece in rows:
            more = target.ids.contiguous(), target.log_probs.contiguous(), width, tolerance(target), *tails
            _launch(top_k_kernel, inputs, piece, part, 4096, more, constants)
    elif isinstance(target, Allowed):
        ids, begin, end = target.classes.contiguous(), target.begin.contiguous(), target.end.contiguous()
        held = torch.empty(len(ids), dtype=torch.float32, device=ids.device)
        for piece in rows:
            more = block.target_logits, ids, begin, end, target.broken, held, len(ids), inputs.ignore_index
            # Log-probabilities have the same bits with and without a gradient.
            _launch(support_kernel, inputs, piece, part, 1024, more, {}, enable_fp_fusion=False)


def _copied(block: Block) -> Iterator[Placed]:
    """Yield copies of logits."""
    logits, rows = block.logits, RowView(block.logits)
    step = block_rows(logits, logits.dtype)
    for start in range(0, rows.count, step):
        chunk = rows[start : min(start + step, rows.count)]
        yield from placed(Block(chunk.clone(), block.start + start))


def _launch(
    kernel: Kernel, inputs: Inputs, piece: Placed, part: Part, most: int, more: tuple[object, ...],
    constants: dict[str, Any], aligned: bool = True, **options: object,
) -> None:  # fmt: skip
    """Launch a kernel, with one program per row and blocks of up to `most` classes. `more`: its own arguments.

    `aligned`: whether its other matrices have rows at multiples of 16 bytes.
    """
    vocabulary, (rows, start, _) = inputs.setting.width, inputs.rows_of(part, piece.start)
    block = min(next_power_of_2(vocabulary), most)
    ragged = piece.layout.ragged or vocabulary % 8 != 0 or not aligned
    way = inputs.way._replace(grouped=piece.layout.grouped, ragged=ragged, block=block)
    if kernel is support_kernel:
        way = way._replace(blocks=next_power_of_2(cdiv(vocabulary, block)))
    if "their_way" in constants:
        capped, scaled = constants["their_way"]
        way = way._replace(scaled=scaled or inputs.decisions.scaled)
        constants = constants | {"their_way": Way(capped, way.scaled, ragged=ragged, block=block)}
    launch(
        kernel,
        piece.number,
        (
            *(piece.logits, *piece.rows, piece.grad, *piece.places, rows, inputs.upstreams, inputs.recorded),
            *(inputs.numbers, start, vocabulary, *more),
        ),
        {"way": way, **constants},
        num_warps=max(min(block // _ELEMENTS_PER_WARP, 16), 1),
        **options,
    )


def _launch_dense(
    inputs: Inputs, block: Block, piece: Placed, part: Part, step: int, others: tuple[object, ...]
) -> None:
    """Take a step of a divergence from a teacher's logits (R, V), with its `others` of arguments."""
    options, target = inputs.options, inputs.setting.call.target
    assert isinstance(target, Dense)
    scale, cap, _ = target.activation
    beta, varies = options.beta, options.kind == "tv"
    assert block.teacher is not None
    start = piece.start - block.start
    teacher = block.teacher[start : start + piece.number]
    numbers, tensor_numbers = floats_of((None, None, cap, scale), teacher.device)
    kind = "variation" if varies else {0: "forward", 1: "reverse"}.get(beta, "from_p" if beta <= 0.5 else "from_q")
    constants = {
        "their_way": (cap is not None, isinstance(scale, Tensor) or scale != 1),
        "KIND": kind,
        "STEP": step,
    }
    of_teacher = no_rows(teacher.device)
    if tensor_numbers is not None:
        of_teacher = of_teacher._replace(numbers=tensor_numbers)
    own = of_teacher, Numbers(0.0, *numbers)
    more = teacher, teacher.stride(0), *own, 1.0 - beta, float(beta), *others
    aligned = (teacher.stride(0) * teacher.itemsize | teacher.data_ptr()) % 16 == 0
    # Without fused multiply-add, the code for one class (a reference) rounds like the code for all classes. So a
    # difference from the reference class is exactly 0 for that class.
    fused = piece.logits.itemsize != 4
    _launch(divergence_kernel, inputs, piece, part, 4096, more, constants, aligned, maxnreg=64, enable_fp_fusion=fused)


class ShardedSteps(PortableSteps):
    """The steps of a dense teacher's divergence in shards: each fold, and the gradient, in one launch."""

    overlays = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._inputs = Inputs(setting)

    def fold(self, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
        """Write the sums of a block."""
        if self._inputs.setting.width and (self.first_sums or "entropy" not in self._inputs.options.stats):
            self._launch(block._replace(grad=None), part, REFOLD if self.first_sums else FOLD, sums, self.first_sums)
            if not self.first_sums:
                self.write_checks(block, part, sums)
        else:
            super().fold(block, part, sums, adds)

    def invalidate(self, index: Index, wrong: Tensor) -> None:
        """Make loss and gradient NaN in some rows of the call."""
        super().invalidate(index, wrong)
        self._inputs.rows = self._inputs.rows._replace(sample_weight=self.facts.weight)

    def gradient(self, block: Block, part: Part, coefficients: Coefficients) -> None:
        """Write the gradient of a block's logits."""
        if self._inputs.setting.width:
            self._launch(block, part, GRADIENT, None, coefficients)

    def _launch(self, block: Block, part: Part, step: int, sums: Tensor | None, merged: dict[str, Tensor]) -> None:
        """Take one step. `sums` (K, R) of a fold are written."""
        known = torch.stack([merged[name] for name in _MERGED if name in merged]) if merged else None
        for piece in placed(block):
            first = piece.start - block.start
            others: tuple[object, ...] = ()
            for array in (sums, known):
                others += (None, 0) if array is None else (array[:, first : first + piece.number], array.stride(0))
            _launch_dense(self._inputs, block, piece, part, step, others)
