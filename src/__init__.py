"""The cross-entropy loss of language models, one meaning on every device.

`xent.cross_entropy` takes logits, `xent.linear_cross_entropy` takes hidden states and a classifier and never holds the
(tokens x vocabulary) logits. Importing this package loads no framework: each backend is imported by the first call
that needs it.
"""

import sys as _sys

from xent.core.api import cross_entropy, linear_cross_entropy
from xent.core.dispatch import backends
from xent.core.divergence import divergence, linear_divergence
from xent.core.errors import BackendError
from xent.core.log_probs import linear_log_probs, log_probs
from xent.core.spec import BackendInfo, QuantizedWeight, Stats, Support, VocabParallel
from xent.core.teachers import LinearTeacher, TopKTeacher

__version__ = "0.2.0"

# The function hides the package xent.backends: with its attributes, `import xent.backends.torch` works all the same.
backends.__dict__ = vars(_sys.modules["xent.backends"])

__all__ = [
    "BackendError",
    "BackendInfo",
    "LinearTeacher",
    "QuantizedWeight",
    "Stats",
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
    "log_probs",
]
