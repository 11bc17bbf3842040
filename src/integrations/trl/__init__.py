"""For whoever trains with TRL: `patch()`, and its trainers take their log-probabilities from xent.

`functions` has objects with the signatures of TRL's own, and `patching` puts them where TRL's trainers find theirs.
"""

from xent.integrations.trl.functions import ChunkedLogProbFunction, selective_log_softmax_and_entropy
from xent.integrations.trl.patching import Patch, patch, unpatch

__all__ = ["ChunkedLogProbFunction", "Patch", "patch", "selective_log_softmax_and_entropy", "unpatch"]
