"""Store the results of rows that were requested, and those of ignored rows."""

import triton
import triton.language as tl

__all__ = ["record", "store_nothing"]


@triton.jit
def record(place, row, value, mask=None):
    """Store a result of a row or of a block of rows, unless `place` is None because it was not requested."""
    if place is not None:
        tl.store(place + row, value, mask=mask)


@triton.jit
def store_nothing(row, lse, nll, entropy, predictions, hits, z_term, log_sum_sq, mean_logit):
    """Store the statistics of an ignored row."""
    record(lse, row, 0.0)
    record(nll, row, 0.0)
    record(entropy, row, 0.0)
    record(predictions, row, -1)
    record(hits, row, 0.0)
    record(z_term, row, 0.0)
    record(log_sum_sq, row, 0.0)
    record(mean_logit, row, 0.0)
