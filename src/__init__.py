"""The cross-entropy loss of language models, with the same results on every device.

`xent.cross_entropy` computes it from logits. `xent.linear_cross_entropy` computes it from hidden states and a
classifier, without storing the (tokens x vocabulary) logits. Importing this package loads only NumPy: each framework is
imported by the first call that needs it.
"""

import sys as _sys

from xent.api import (
    cross_entropy,
    divergence,
    linear_cross_entropy,
    linear_divergence,
    linear_log_probs,
    linear_top_k,
    log_probs,
    top_k,
)
from xent.backends import backends
from xent.core.spec import (
    BackendError,
    BackendInfo,
    LinearTeacher,
    QuantizedRows,
    QuantizedWeight,
    Stats,
    Subset,
    Support,
    TopKTeacher,
    VocabParallel,
)

__version__ = "0.4.0"

# The function hides the package xent.backends. It gets the package's attributes, so that `xent.backends.torch` works.
backends.__dict__ = vars(_sys.modules["xent.backends"])

__all__ = [
    "BackendError",
    "BackendInfo",
    "LinearTeacher",
    "QuantizedRows",
    "QuantizedWeight",
    "Stats",
    "Subset",
    "Support",
    "TopKTeacher",
    "VocabParallel",
    "__version__",
    "backends",
    "cross_entropy",
    "divergence",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_top_k",
    "log_probs",
    "top_k",
]
