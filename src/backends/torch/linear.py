"""The loop of `linear_cross_entropy` over chunks: compute logits, replace them by their gradient, multiply it back."""

from typing import NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.gradients import Gradients, no_gradients
from xent.backends.torch.job import Job, Upstream, start
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.torch.rows import span
from xent.backends.torch.schedule import Schedule

__all__ = ["Forward", "backward", "forward"]


class Forward(NamedTuple):
    """What a forward pass returns."""

    loss: Tensor
    deferred: Tensor | None
    """The factor that gradients still lack."""
    gradients: list[Tensor]
    """Of a reduced loss; empty tensors where nobody asks for them."""
    stats: list[Tensor]
    norm: Tensor | None
    """(3, N): with it `backward` needs no stored logits. None if this backend or call has no such way."""


def forward(linear: Linear, options: Options) -> Forward:
    """Compute the loss, the statistics, and the gradients of a reduced loss."""
    each_row = options.spec.reduction == "none"
    wanted = any(linear.needs) and not each_row
    narrow = wanted and linear.compute == torch.float16
    job = start(options, linear.weight.shape[0], linear.compute, linear.shift, narrow=narrow)
    norm = job.new_norm(linear) if each_row and any(linear.needs) else None
    if wanted or not job.tiles(linear, norm):
        made = _in_chunks(linear, job, wanted, options.spec.float32_logits and linear.compute.itemsize == 2)
    else:
        made = no_gradients(linear)
    loss, stats = job.finish()
    return Forward(loss, job.deferred, made, stats, norm)


def backward(
    upstream: Upstream, linear: Linear, options: Options, norm: Tensor | None = None, entropy: Tensor | None = None
) -> list[Tensor]:
    """Return the gradients for `upstream`, chunk by chunk: from the norm if there is one, else from logits made again.

    `entropy` (N,), as the forward pass found it, is needed beside the norm where an upstream gradient is the entropy's.
    """
    quiet = options._replace(spec=options.spec.without_stats())
    job = start(quiet, len(linear.weight), linear.compute, linear.shift, upstream)
    if norm is not None:
        return _without_logits(linear, job, norm, entropy)
    return _in_chunks(linear, job, True, options.spec.exact and linear.compute.itemsize == 2)


def _without_logits(linear: Linear, job: Job, norm: Tensor, entropy: Tensor | None) -> list[Tensor]:
    """Compute the gradients chunk by chunk. A chunk stores the gradient of its logits, but not the logits."""
    step = linear.rows_per_chunk()
    schedule = Schedule(job, step)
    gradients = Gradients(linear.padded, schedule)
    rows = max(min(step, schedule.count), 0)
    memory = torch.empty(rows, linear.columns, dtype=linear.compute, device=linear.weight.device)
    for part in schedule:
        taken = job.take(linear, part)
        grad = memory[: part.stop - part.start]
        job.multiply(linear, taken, part, grad, norm, entropy)
        gradients.add(part, taken.trained, grad)
    return gradients.result(len(linear.weight))


def _in_chunks(linear: Linear, job: Job, wanted: bool, wide: bool = False) -> list[Tensor]:
    """Compute the rows chunk by chunk, and if `wanted` the gradients that are needed.

    `wide`: store logits in float32, without rounding them to the compute dtype.
    """
    compute, device, vocabulary = linear.compute, linear.weight.device, linear.weight.shape[0]
    step = linear.rows_per_chunk(4 + wanted * compute.itemsize if wide else None, wanted)
    schedule = Schedule(job, step)
    padded = linear.padded
    gradients = Gradients(padded, schedule) if wanted else None
    rows = max(min(step, schedule.count), 0)
    room = torch.empty(rows, linear.columns, dtype=torch.float32 if wide else compute, device=device)
    memory = torch.empty_like(room, dtype=compute) if wide and wanted else room
    if wide and wanted and linear.columns > vocabulary:
        memory[:, vocabulary:].zero_()
    for part in schedule:
        taken, count = job.take(linear, part), part.stop - part.start
        logits = span(room, 0, count)
        grad = logits if memory is room else span(memory, 0, count)
        padded.write_logits(taken.hidden, logits)
        block = linear.without_padding(logits)
        place = None if gradients is None else block if grad is logits else linear.without_padding(grad)
        job.chunk(block, part, place, taken.target_logits)
        if gradients is not None:
            if taken.trained is not taken.hidden:
                grad[:, vocabulary:].zero_()  # a skipped row with NaN times the padding's 0 gave NaN
            gradients.add(part, taken.trained, grad)
    return no_gradients(linear) if gradients is None else gradients.result(vocabulary)
