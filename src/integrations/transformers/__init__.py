"""The transformers integration: after `patch(model)` the model computes its loss without materialised logits.

Data flow: `patching` changes the class of the model's head to one of `heads`. That head returns deferred logits
(`deferred`), which hold a `recipe`: the hidden states, the weight, and the scale and softcap of the logits. `steps`
records the calls that the model may make with deferred logits. When the model computes its loss, `loss` turns the
recipe into one call of `xent.linear_cross_entropy`. Any other operation repeats the recorded calls and gets real
logits. `changes` detects weights that have changed in between. `history` stores which of these happened, for
`explain` and for one warning per model.
"""

import transformers as _transformers  # noqa: F401  # pyright: ignore[reportMissingImports]

from xent.integrations.patch import Patch
from xent.integrations.transformers.loss import causal_lm_loss
from xent.integrations.transformers.patching import explain, patch, unpatch

__all__ = ["Patch", "causal_lm_loss", "explain", "patch", "unpatch"]
