"""`linear_cross_entropy` on a shard of the classifier: a loop over chunks of rows, with one collective per chunk.

The next chunk's logits are computed while a chunk's sums are being gathered, so the logits of two chunks exist at one
time. The gradient of the hidden states is summed over ranks once, while the last chunk's contribution to the
classifier's gradient is computed.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.gradients import Gradients, no_gradients
from xent.backends.torch.job import Taken, Upstream
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.torch.product_sum import rounds_sums
from xent.backends.torch.schedule import Part, Schedule
from xent.backends.torch.sharded.collectives import Flight
from xent.backends.torch.sharded.job import Saved, ShardJob
from xent.backends.torch.sharded.layout import Layout
from xent.backends.torch.sharded.steps import Coefficients
from xent.backends.torch.sharded.tokens import Tokens
from xent.core.chunks import rows_per_chunk

__all__ = ["backward", "forward"]

_ALIGNED, _PADDED = 8, 64


def forward(
    linear: Linear, options: Options, layout: Layout, tokens: Tokens, keeps: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor], list[Tensor]]:
    """Return (loss, factor to multiply gradients by, data for the backward pass, gradients, statistics).

    The factor is None unless gradients are stored without it. Gradients are those of a reduced loss.
    """
    wanted = any(linear.needs) and options.spec.reduction != "none"
    whole = _whole(linear, layout, tokens)
    job = ShardJob(options, layout, linear.compute, linear.shift, narrow=wanted and linear.compute == torch.float16)
    job.keep(keeps)
    # On CUDA a product with a float32 result costs no more. With gradients, float32 logits would take too much memory.
    wide = options.spec.float32_logits or (linear.weight.is_cuda and not wanted)
    made = _Chunks(whole, job, wanted, tokens, wide, True).forward(linear)
    loss, stats = job.finish()
    return loss, job.deferred, job.kept, made, stats


def backward(
    upstream: Upstream, linear: Linear, kept: Tensor, options: Options, layout: Layout, tokens: Tokens
) -> list[Tensor]:
    """Return the gradients. Logits are recomputed chunk by chunk, and the sums are taken from `kept`.

    Where these come from float32 logits for the sake of statistics, so do the gradients: with logits rounded to 16
    bits, the probabilities of a row would not add up to 1.
    """
    job = ShardJob(options, layout, linear.compute, linear.shift, saved=Saved(kept, upstream))
    return _Chunks(_whole(linear, layout, tokens), job, True, tokens, options.spec.float32_logits, False).backward(
        linear
    )


def _whole(linear: Linear, layout: Layout, tokens: Tokens) -> Linear:
    """Return the call with the hidden states of all tokens, and the classifier without padding."""
    source = linear.input
    if tokens.axis is not None:
        source = tokens.gathered(source.to(linear.compute))
    weight, bias = linear.weight, linear.bias
    if layout.count < layout.rows:
        weight, bias = weight[: layout.count], None if bias is None else bias[: layout.count]
    return replace(linear, input=source, weight=weight, bias=bias)


class _PendingChunk:
    """A chunk whose sums are being gathered."""

    def __init__(self, part: Part, taken: Taken, logits: Tensor, flight: Flight) -> None:
        self.part, self.taken, self.logits, self.flight = part, taken, logits, flight


class _Chunks:
    """The loop over chunks.

    `wanted`: gradients are computed. `wide`: no logit is rounded below float32. `overlaps`: sums are gathered
    over ranks while the next chunk is computed.
    """

    def __init__(self, linear: Linear, job: ShardJob, wanted: bool, tokens: Tokens, wide: bool, overlaps: bool) -> None:
        self._linear, self._job, self._tokens, self._wanted = linear, job, tokens, wanted
        compute, device = linear.compute, linear.weight.device
        self._wide = wide and compute.itemsize == 2
        step, self._chunks_alive = self._chunk_size(overlaps)
        self._schedule = Schedule(job, step)
        self._padded = linear.padded
        self._gradients = Gradients(self._padded, self._schedule) if wanted else None
        rows, self._classes = max(min(step, self._schedule.count), 0), len(linear.weight)
        dtype = torch.float32 if self._wide else compute
        self._buffers = [
            torch.empty(rows, linear.columns, dtype=dtype, device=device) for _ in range(self._chunks_alive)
        ]
        both = self._wide and wanted
        self._narrow = torch.empty(rows, linear.columns, dtype=compute, device=device) if both else None
        self._flight: Flight | None = None

    def _chunk_size(self, overlaps: bool) -> tuple[int, int]:
        """Return (rows of a chunk, chunks that exist at one time), which are the same on all ranks.

        They are computed with the number of classes of the largest shard.
        """
        linear, most = self._linear, self._job.layout.most
        if linear.weight.device.type == "cuda" and most % _ALIGNED:
            most = -(-most // _PADDED) * _PADDED
        size = 4 if self._wide else linear.compute.itemsize
        beside = linear.compute.itemsize if self._wide and self._wanted else 0
        device, rows = linear.weight.device, len(linear.hidden)
        rounds = self._wanted and linear.needs[1] and rounds_sums(linear.compute, linear.weight.dtype, device)
        step = rows_per_chunk(rows, most, size + beside, linear.workspace, device.type, rounds)
        if step >= rows or not overlaps:
            return step, 1
        return rows_per_chunk(rows, most, 2 * size + beside, linear.workspace, device.type, rounds), 2

    def forward(self, linear: Linear) -> list[Tensor]:
        """Compute all rows. Return the gradients of a reduced loss, or no gradients if none are needed."""
        pending = None
        for number, part in enumerate(self._schedule):
            taken = self._job.take(self._linear, part)
            logits = self._write(part, taken, number)
            flight = self._job.fold(part, [(part.start, logits[:, : self._classes])], taken.target_logits)
            if pending is not None:
                self._land(pending, False)
            pending = _PendingChunk(part, taken, logits, flight)
        if pending is not None:
            self._land(pending, True)
        return self._result(linear)

    def backward(self, linear: Linear) -> list[Tensor]:
        """Recompute the logits of all rows. Return the gradients."""
        for number, part in enumerate(self._schedule):
            taken = self._job.take(self._linear, part)
            logits = self._write(part, taken, number)
            self._differentiate(part, taken, logits, self._job.again(part), part.last)
        return self._result(linear)

    def _write(self, part: Part, taken: Taken, number: int) -> Tensor:
        logits = self._buffers[number % self._chunks_alive][: part.stop - part.start]
        self._padded.write_logits(taken.hidden, logits)
        return logits

    def _land(self, pending: _PendingChunk, last: bool) -> None:
        made = self._job.land(pending.flight, pending.part, self._gradients is not None)
        if made is not None:
            self._differentiate(pending.part, pending.taken, pending.logits, made, last)

    def _differentiate(self, part: Part, taken: Taken, logits: Tensor, made: Coefficients, last: bool) -> None:
        """Overwrite the logits with their gradient, and add its products to the gradients of input and classifier."""
        gradients, classes = self._gradients, self._classes
        assert gradients is not None
        grad = logits if self._narrow is None else self._narrow[: len(logits)]
        self._job.write(made, part, [(part.start, logits[:, :classes], grad[:, :classes])])
        grad[:, classes:] = 0
        gradients.add_to_input(part, grad)
        if last:
            self._send()
        gradients.add_to_classifier(part, taken.trained, grad)

    def _send(self) -> None:
        """Start the sum of the input's gradient over ranks."""
        of_input = None if self._gradients is None else self._gradients.of_input()
        if of_input is not None:
            self._flight = self._tokens.summed(of_input)

    def _result(self, linear: Linear) -> list[Tensor]:
        made = no_gradients(linear)
        if self._gradients is None:
            return made
        if self._flight is None:
            self._send()
        missing = len(linear.weight) - self._classes
        weight, bias = self._gradients.of_classifier(self._classes)
        if weight is not None:
            made[1] = F.pad(weight, (0, 0, 0, missing)) if missing else weight
        if bias is not None:
            made[2] = F.pad(bias, (0, missing)) if missing else bias
        if self._flight is not None:
            made[0] = self._tokens.mine(self._flight.land(), linear.input.shape)
        return made
