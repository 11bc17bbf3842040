"""The TRL integration: after `patch()`, TRL's trainers compute log-probabilities and divergences with xent.

`functions` has objects with the signatures of TRL's kernels. `patching` installs them where TRL's trainers look theirs
up.
"""

from xent.integrations.patch import Patch
from xent.integrations.trl.functions import (
    ChunkedDivergenceFunction,
    ChunkedLogProbFunction,
    selective_log_softmax_and_entropy,
)
from xent.integrations.trl.patching import patch, unpatch

__all__ = [
    "ChunkedDivergenceFunction",
    "ChunkedLogProbFunction",
    "Patch",
    "patch",
    "selective_log_softmax_and_entropy",
    "unpatch",
]
