"""Losses over a vocabulary in shards: each rank of a process group has some of the classes.

A call has these collectives, in this order on every rank:

1. one exchange of the ranges of classes, unless every rank names `first` and `size` (`ranges`);
2. the gather of hidden states, if tokens are split (`Tokens`);
3. the sum of the divisor, if class weights decide it;
4. the gather of the number of rows to compute, if rows may be left out (`xent.backends.torch.contract.Schedule`);
5. the gather of sums, for each part of the rows, with checksums of what must be equal on all ranks (`checks`);
6. the sum of the hidden states' gradient (`Tokens`).

The loop calls the functions of `collectives` without a group too. `dtensor` translates calls with DTensors.
"""

__all__: list[str] = []
