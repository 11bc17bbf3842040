"""A plugin of axolotl, for its configuration: ``plugins: [xent.integrations.axolotl.XentPlugin]``.

It patches the models that axolotl loads as `xent.integrations.transformers.patch` does, and for a run with ``rl`` also
TRL, as `xent.integrations.trl.patch` does. Leave out axolotl's own plugins and options for the loss: CutCrossEntropy,
``liger_fused_linear_cross_entropy`` and ``chunked_cross_entropy``.
"""

import warnings
from typing import Any

from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]

from xent.integrations import transformers, trl

__all__ = ["XentPlugin"]


class XentPlugin(BasePlugin):  # type: ignore[misc]
    """Compute the losses of axolotl's models without their logits. The interface is that of axolotl 0.19."""

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Patch the model, after its adapters were added, and TRL if the run needs it.

        Parameters
        ----------
        cfg : DictDefault
            The configuration of the run.
        model : transformers.PreTrainedModel or peft.PeftModel
            The model.

        Raises
        ------
        ValueError
            The model has no head whose logits can be deferred, for example a reward model.
        """
        transformers.patch(model)
        if cfg.rl:
            try:
                trl.patch()
            except ImportError as error:  # axolotl pins TRL
                warnings.warn(f"{error}. The model was patched", RuntimeWarning, stacklevel=2)

    def post_train_unload(self, cfg: Any) -> None:
        """Restore TRL's functions.

        Parameters
        ----------
        cfg : DictDefault
            The configuration of the run.
        """
        trl.unpatch()
