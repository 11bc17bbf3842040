"""Functions that store the results of ignored rows and reduce the losses of all rows."""

import triton
import triton.language as tl

__all__ = ["reduce_rows", "store_nothing"]


@triton.jit
def store_nothing(row, lse, nll, entropy, predictions, hits, z_term, log_sum_sq, mean_logit):
    """Store the statistics of an ignored row."""
    if lse is not None:
        tl.store(lse + row, 0.0)
    if nll is not None:
        tl.store(nll + row, 0.0)
    if entropy is not None:
        tl.store(entropy + row, 0.0)
    if predictions is not None:
        tl.store(predictions + row, -1)
    if hits is not None:
        tl.store(hits + row, 0.0)
    if z_term is not None:
        tl.store(z_term + row, 0.0)
    if log_sum_sq is not None:
        tl.store(log_sum_sq + row, 0.0)
    if mean_logit is not None:
        tl.store(mean_logit + row, 0.0)


@triton.jit
def reduce_rows(values, count, divisor, BLOCK: tl.constexpr):
    """Return the sum of values (count,), divided by `divisor` unless it is None; 0 if the divisor is 0."""
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        sums += tl.load(values + rows, mask=rows < count, other=0.0, cache_modifier=".cg")
    found = tl.sum(sums, 0)
    if divisor is not None:
        d = tl.load(divisor)
        found = tl.where(d == 0, 0.0, tl.div_rn(found, tl.where(d == 0, 1.0, d)))
    return found
