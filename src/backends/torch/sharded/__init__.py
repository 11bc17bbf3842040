"""A vocabulary in shards, over the ranks of a process group: one more way to run, a loop over the row algebra's steps.

How a call flows: `entry` (from the driver) -> `eager`, or for compilers and modes `autograd` and `ops` (what is saved,
what backward returns) -> `calls` (`layout`: who has which classes) -> `logits` or `linear` (the loop over chunks) -> a
`job`, the rows of the call. The `steps` of a backend (`plain` here, `xent.backends.triton.shard_steps` on NVIDIA GPUs)
fold a chunk into a few numbers a row (`sums`), which every rank gathers from all (`collectives`) and merges in the
order of ranks; `landing` and `finish` turn them into the loss, the statistics and the coefficients of the gradient,
with the same bits on every rank. `tokens` is sequence parallelism, and `peers` tells the other ranks of an error.
"""

__all__: list[str] = []
