"""For whoever trains with TRL: `patch()`, and its trainers take log-probabilities and divergences from xent.

`functions` has objects with the signatures of TRL's own, and `patching` puts them where TRL's trainers find theirs.
"""

from xent.integrations.trl.functions import (
    ChunkedDivergenceFunction,
    ChunkedLogProbFunction,
    selective_log_softmax_and_entropy,
)
from xent.integrations.trl.patching import Patch, patch, unpatch

__all__ = [
    "ChunkedDivergenceFunction",
    "ChunkedLogProbFunction",
    "Patch",
    "patch",
    "selective_log_softmax_and_entropy",
    "unpatch",
]
