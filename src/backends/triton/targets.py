"""Launches for targets that have their own kernels: supports, and the teachers of divergences."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Part, Setting
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.memory import logit_blocks
from xent.backends.torch.portable.facts import impossible, tolerance
from xent.backends.triton.geometry import Placed, placed
from xent.backends.triton.kernels.classes_kernels import support_kernel, top_k_kernel
from xent.backends.triton.kernels.divergence_kernel import WHOLE, divergence_kernel
from xent.backends.triton.launches import launch, next_power_of_2
from xent.core.call import Allowed, Classes, Dense, Given, TopK
from xent.core.chunks import rows_per_block

__all__ = ["serves", "shard", "whole_rows"]

_ELEMENTS_PER_WARP = 256


def serves(setting: Setting) -> bool:
    """Return whether `whole_rows` serves the target of a call."""
    call = setting.call
    return call.shards is None and not isinstance(call.target, Classes) and not isinstance(call.options.beta, Tensor)


def whole_rows(steps: Any, block: Block, part: Part) -> None:
    """Fold and finish the rows of a block. Write their gradient if `block.grad` is not None.

    `steps` are `xent.backends.triton.steps.TritonSteps`.
    """
    setting: Setting = steps.setting
    call, target = setting.call, setting.call.target
    runs: dict[Any, Any] = {Allowed: _allowed, Dense: _from_logits, TopK: _from_top_k}
    if isinstance(target, TopK):
        if setting.upstream is None and part.start + block.start == 0 and looks_at_targets(setting.device):
            weight = call.options.sample_weight
            impossible(target, setting, None if weight is None else weight == 0)
        if isinstance(call.source, Given):
            block = block if block.grad is None else block._replace(logits=block.grad.copy_(block.logits))
    copies = isinstance(target, TopK) and isinstance(call.source, Given) and block.grad is None
    for some in _copied(block) if copies else placed(block):
        if some.count:
            runs[type(target)](steps, block, some, part)


def _copied(block: Block) -> Iterator[Placed]:
    """Yield copies of logits, which a kernel may overwrite."""
    logits = block.logits
    step = rows_per_block(logits.shape[-1], logits.itemsize, logits.device.type, 1)
    for start, z, _ in logit_blocks(logits, None):
        for first in range(0, len(z), step):
            yield from placed(Block(z[first : first + step].clone(), block.start + start + first))


def _launch(
    kernel: Any, steps: Any, some: Placed, part: Part, most: int, more: tuple[Any, ...], constants: dict[str, Any],
    teacher: tuple[Tensor, bool, bool] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Launch a kernel, with one program per row and blocks of up to `most` classes. `more`: its own arguments.

    `teacher` has a teacher's logits, and whether they have a softcap and a scale.
    """
    vocabulary, (rows, start) = steps.setting.width, steps.rows_of(part, some.start)
    aligned = vocabulary % 8 == 0 and not some.ragged
    if teacher is not None:
        aligned = aligned and (teacher[0].stride(0) * teacher[0].itemsize | teacher[0].data_ptr()) % 16 == 0
    block = min(next_power_of_2(vocabulary), most)
    way = steps.way._replace(**some.constants())._replace(ragged=not aligned, block=block)
    if teacher is not None:
        constants = {"their_way": way._replace(capped=teacher[1], scaled=teacher[2]), **constants}
    launch(
        kernel,
        some.count,
        (
            *(some.logits, *some.rows, some.grad, *some.places, rows, steps.upstreams, steps.recorded),
            *(steps.numbers, start, vocabulary, *more),
        ),
        {"way": way, **constants},
        num_warps=max(min(block // _ELEMENTS_PER_WARP, 16), 1),
        **options,
    )


def _allowed(steps: Any, block: Block, some: Placed, part: Part) -> None:
    """Compute rows for classes with supports."""
    target, grad = steps.setting.call.target, some.grad
    ids = target.classes.contiguous()
    held = torch.empty(len(ids), dtype=torch.float32, device=ids.device)
    filled = grad is not None and grad.untyped_storage().data_ptr() != some.logits.untyped_storage().data_ptr()
    if grad is not None and filled:
        grad.zero_()
    more = block.target_logits, ids, target.begin.contiguous(), target.end.contiguous(), target.broken, held, len(ids)
    # Without fused multiply-add, log-probabilities have the same bits with and without a gradient.
    _launch(
        support_kernel, steps, some, part, 1024, (*more, steps.ignore_index), {"FILLED": filled},
        enable_fp_fusion=False,
    )  # fmt: skip


def _from_logits(steps: Any, block: Block, some: Placed, part: Part, step: int = WHOLE, *others: Any) -> None:
    """Compute rows for a teacher's logits (R, V), or one step of them with its `others` of arguments."""
    options, (scale, cap, _) = steps.setting.call.options, steps.setting.call.target.activation
    beta, varies = options.beta, options.kind == "tv"
    assert block.teacher is not None
    start = some.start - block.start
    teacher, values = block.teacher[start : start + some.count], None
    numbers = 0.0 if cap is None else cap, scale
    if isinstance(scale, Tensor) or isinstance(cap, Tensor):
        made: dict[str, Any] = {"dtype": torch.float32, "device": teacher.device}
        values = torch.stack(
            [one.to(**made) if isinstance(one, Tensor) else torch.full((), one, **made) for one in numbers]
        )
    exact = some.logits.itemsize == 4
    kind = "variation" if varies else {0: "forward", 1: "reverse"}.get(beta, "from_p" if beta <= 0.5 else "from_q")
    constants = {"KIND": kind, "STEP": step, "ENTROPY": "entropy" in options.stats}
    scaled = values is not None or scale != 1
    known = (0.0, 1.0) if values is not None else map(float, numbers)
    more = teacher, teacher.stride(0), values, *known, 1.0 - beta, float(beta), *(others or (None, 0, None, 0))
    # Without fused multiply-add, the code for one class (a reference) rounds like the code for all classes. So a
    # difference from the reference class is exactly 0 for that class.
    _launch(
        divergence_kernel, steps, some, part, 4096, more, constants, (teacher, cap is not None, scaled), maxnreg=64,
        enable_fp_fusion=not exact,
    )  # fmt: skip


def shard(steps: Any, block: Block, part: Part, step: Any, sums: Tensor | None, merged: Tensor | None) -> None:
    """Take one step of a dense teacher's divergence in shards. `sums` (K, R) of a fold are written."""
    for some in placed(block):
        if some.count:
            first = some.start - block.start
            others: list[Any] = []
            for one in (sums, merged):
                others += (None, 0) if one is None else (one[:, first : first + some.count], one.stride(0))
            _from_logits(steps, block, some, part, step, *others)


def _from_top_k(steps: Any, block: Block, some: Placed, part: Part) -> None:
    """Compute rows for the teacher's K most probable classes."""
    target = steps.setting.call.target
    width = target.ids.shape[1]
    constants = {
        "BUCKET": target.tail == "bucket",
        "RENORMALIZED": target.tail == "renormalize",
        "VARIATION": steps.setting.call.options.kind == "tv",
        "WIDTH": next_power_of_2(width),
    }
    more = target.ids.contiguous(), target.log_probs.contiguous(), width, tolerance(target)
    _launch(top_k_kernel, steps, some, part, 4096, more, constants, enable_fp_fusion=True)
