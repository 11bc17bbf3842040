"""The steps of a row in PyTorch's own operations, for every device and dtype.

`rows` has what is known of rows without logits, folds blocks of logits and writes their gradients; `steps` computes
losses, statistics and coefficients from the sums, and does all this in blocks that fit into caches.
"""

__all__: list[str] = []
