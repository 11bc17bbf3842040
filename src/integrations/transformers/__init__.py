"""The transformers integration: after `patch(model)` the model computes its loss without materialised logits.

Data flow: `patching` changes the class of the model's head. The head returns deferred logits (`deferred`), which hold a
recipe: the hidden states, the weight, and the scale and softcap of the logits. `calls` records the calls that the model
may make with deferred logits, and turns the recipe into one call of `xent.linear_cross_entropy` when the model computes
its loss. Any other operation repeats the recorded calls and gets real logits, if no weight has changed in between. A
history (`history`) of which of these happened is for `explain` (`explaining`) and for one warning per model.
"""

from xent.integrations.patch import Patch
from xent.integrations.transformers.calls import causal_lm_loss
from xent.integrations.transformers.explaining import explain
from xent.integrations.transformers.patching import patch, unpatch

__all__ = ["Patch", "causal_lm_loss", "explain", "patch", "unpatch"]
