"""What kernels record of a row that nobody computes, and how the last of them reduces the losses of all rows."""

import triton
import triton.language as tl

__all__ = ["reduce_rows", "see_all", "store_nothing", "take_ticket"]


@triton.jit
def store_nothing(row, lse, nll, entropy, predictions, hits, z_term, log_sum_sq, mean_logit):
    """Record the statistics of an ignored row."""
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
def take_ticket(counter):
    """Return how many programs stored their row's loss before this program, which has stored its own.

    An atomic with acquire semantics would empty the L1 cache, which holds the row. Only the last program acquires, in
    `see_all`.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter, 1.0, sem="release")


@triton.jit
def see_all(counter):
    """Acquire what all programs stored before they took their tickets."""
    tl.atomic_add(counter, 0.0, sem="acq_rel")
    tl.debug_barrier()


@triton.jit
def reduce_rows(values, count, divisor, BLOCK: tl.constexpr):
    """Return the sum of (count,) values over the divisor, 0 where that is 0; None divides by nothing."""
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        sums += tl.load(values + rows, mask=rows < count, other=0.0, cache_modifier=".cg")
    found = tl.sum(sums, 0)
    if divisor is not None:
        d = tl.load(divisor)
        found = tl.where(d == 0, 0.0, tl.div_rn(found, tl.where(d == 0, 1.0, d)))
    return found
