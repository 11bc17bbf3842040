"""Losses over a vocabulary that is sharded over the ranks of a process group.

A call passes through these files:

1. `entry` receives the call from the driver. `eager` (or `autograd` and `ops`, for compilers and modes) decides what is
   saved for the backward pass.
2. `calls` finds the layout, which says which rank has which classes (`layout`), and runs `logits` or `linear`, which
   has the loop over chunks. Both use a `job`, which holds the rows of the call.
3. The `steps` of a backend (`plain` here, `xent.backends.triton.shard_steps` on NVIDIA GPUs) fold each chunk of logits
   into a few numbers per row: sums, and the raw logit of the target (`sums`).
4. All ranks gather these numbers (`collectives`), merge the sums in rank order, and apply scale and softcap to the
   target's logit (`xent.backends.torch.activation`).
5. `landing` and `finish` compute the loss, the statistics and the coefficients of the gradient from the merged sums.
   They have the same bits on every rank.

`tokens` implements sequence parallelism. `peers` tells the other ranks about an error on this one.
"""

__all__: list[str] = []
