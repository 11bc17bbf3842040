"""The results of ignored rows."""

import triton
import triton.language as tl

__all__ = ["store_nothing"]


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
