"""The steps of a row in PyTorch's own operations, for every device and dtype.

`facts` gathers what is known of rows without logits, `rows` folds blocks of logits and writes their gradients, `finish`
computes losses, statistics and coefficients from the sums, and `steps` does all this in blocks that fit into caches.
"""

from xent.backends.torch.portable.steps import PortableSteps

__all__ = ["PortableSteps"]
