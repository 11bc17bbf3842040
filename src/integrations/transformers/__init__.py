"""One line for whoever trains with transformers: `patch(model)`, and the loss never builds the logits.

How data flows: `patching` gives the model's head the class of `heads`; the head returns logits of `deferred`, which
keep a `recipe` of how they are made; `calls` says what the model may do to them, and `steps` records it; when a loss
is taken, `loss` turns the recipe into one call of `xent.linear_cross_entropy`. Any other use follows the recipe and
gets real logits. `changes` refuses those of weights that changed since, and `history` remembers what became of each for
`explain` and one warning.
"""

import transformers as _transformers  # noqa: F401  # pyright: ignore[reportMissingImports]

from xent.integrations.transformers.loss import causal_lm_loss
from xent.integrations.transformers.patching import Patch, patch, unpatch
from xent.integrations.transformers.report import explain

__all__ = ["Patch", "causal_lm_loss", "explain", "patch", "unpatch"]
