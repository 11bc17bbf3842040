"""`cross_entropy` on a shard of the logits: fold all rows, gather the sums in one collective, write the gradient."""

from torch import Tensor

from xent.backends.torch.job import Upstream
from xent.backends.torch.options import Options
from xent.backends.torch.rows import gradient_like, logit_blocks
from xent.backends.torch.schedule import Part
from xent.backends.torch.sharded.job import Saved, ShardJob
from xent.backends.torch.sharded.layout import Layout

__all__ = ["backward", "forward"]


def forward(
    logits: Tensor, grad: Tensor | None, keeps: bool, options: Options, layout: Layout
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Return (loss, data for the backward pass if `keeps`, statistics) for logits (..., V_r).

    If `grad` is given, the gradient of the reduced loss is written to it.
    """
    job = ShardJob(options, layout, logits.dtype)
    job.keep(keeps)
    whole = Part(0, job.count, None, True)
    inside = logits[..., : layout.count]
    flight = job.fold(whole, ((start, block) for start, block, _ in logit_blocks(inside, None)), None)
    made = job.land(flight, whole, grad is not None)
    if grad is not None and made is not None:
        job.write(made, whole, logit_blocks(inside, grad[..., : layout.count]))
        grad[..., layout.count :] = 0
    loss, stats = job.finish()
    return loss, job.kept, stats


def backward(
    upstream: Upstream, logits: Tensor, kept: Tensor, options: Options, layout: Layout, inplace: bool = False
) -> Tensor:
    """Return the gradient, computed with the `kept` data; in the logits' memory with `inplace`."""
    grad = logits if inplace else gradient_like(logits)
    job = ShardJob(options, layout, logits.dtype, saved=Saved(kept, upstream))
    whole = Part(0, job.count, None, True)
    inside, place = logits[..., : layout.count], grad[..., : layout.count]
    job.write(job.again(whole), whole, logit_blocks(inside, place))
    grad[..., layout.count :] = 0
    return grad
