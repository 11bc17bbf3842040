"""The label smoothing of transformers' Trainer for deferred logits."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from xent.integrations.transformers.deferred import is_open
from xent.integrations.transformers.loss import deferred_loss

__all__ = ["smooth_from_hidden_states"]


def smooth_from_hidden_states(smooth: Callable[..., Any]) -> Callable[..., Any]:
    """Return a LabelSmoother.__call__ that computes the loss of deferred logits from hidden states."""

    @functools.wraps(smooth)
    def smoothed(self: Any, model_output: Any, labels: Tensor, shift_labels: bool = False, **kwargs: Any) -> Any:
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        loss: Any = NotImplemented
        if is_open(logits) and labels.shape == logits.shape[:-1]:
            counted = labels[..., 1:] if shift_labels else labels
            given = kwargs.get("num_items_in_batch")  # the first releases of transformers 5 do not pass it
            count = counted.ne(self.ignore_index).sum() if given is None else given
            loss = deferred_loss(
                logits,
                labels,
                ignore_index=self.ignore_index,
                label_smoothing=self.epsilon,
                normalizer=count,
                shift=int(shift_labels),
            )
        if loss is NotImplemented:
            return smooth(self, model_output, labels, shift_labels, **kwargs)
        return loss

    smoothed._xent_wraps = smooth  # type: ignore[attr-defined]
    return smoothed
