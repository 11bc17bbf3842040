"""The loss of deferred logits, computed from hidden states, and the loss functions of transformers."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import xent
from xent.integrations.transformers.deferred import DeferredLogits, check_unchanged, is_open
from xent.integrations.transformers.history import note
from xent.integrations.transformers.recipe import autocast_dtype, describe, run

__all__ = ["causal_lm_loss", "cross_entropy", "deferred_loss", "smooth_from_hidden_states"]


def deferred_loss(logits: Any, target: Tensor, **options: Any) -> Any:
    """Return `xent.linear_cross_entropy` of deferred logits (..., V) and targets (...).

    Return NotImplemented for real logits, and for operations on the logits that the function has no option for.
    """
    if not is_open(logits):
        return NotImplemented
    recipe = logits._recipe
    check_unchanged(recipe, looked_at=False)
    offset, softcap = recipe.offset, recipe.bound
    logit_scale = recipe.scale * (1.0 if softcap is None else softcap)  # k tanh(s z) = k tanh((k s) z / k)

    def task(products: Any, bias: Any) -> Any:
        if offset is not None:
            bias = offset.flatten() if bias is None else bias + offset.flatten()
        if len(products) == 1:
            hidden, weight = products[0].hidden, products[0].weight
        else:
            hidden = torch.cat([product.hidden * product.scale for product in products], -1)
            weight = torch.cat([product.weight for product in products], -1)
        loss: Tensor = xent.linear_cross_entropy(
            hidden, weight, target, linear_bias=bias, logit_scale=logit_scale, softcap=softcap, **options
        )
        return loss

    with nullcontext() if logits._tracked else torch.no_grad():
        loss = recipe.hooked(run(recipe, task))
    for call in recipe.calls:
        note(call, fused=describe(recipe))
    return loss


def cross_entropy(
    function: Any,
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return `function`, torch.nn.functional.cross_entropy, of deferred logits (N, V) or (V,), or NotImplemented.

    The result has the dtype that PyTorch's has: that of the logits, or float32 under autocast.
    """
    if size_average is not None or reduce is not None or not is_open(input) or input.ndim > 2:
        return NotImplemented
    if not isinstance(target, Tensor) or isinstance(target, DeferredLogits) or target.requires_grad:
        return NotImplemented
    if not target.is_floating_point() and target.shape != input.shape[:-1]:
        raise ValueError(
            f"labels must hold one class for each of the {input.shape[:-1].numel()} rows of logits, got shape "
            f"{tuple(target.shape)}: pass labels of the shape of input_ids, and with logits_to_keep, or shift_labels, "
            "only those of the positions that are kept"
        )
    loss = deferred_loss(
        input,
        target,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    if loss is NotImplemented:
        return loss
    rounds = input.dtype.itemsize < 4 and autocast_dtype(input.device.type) is None  # autocast: float32
    return loss.to(input.dtype) if rounds or loss.dtype.itemsize < input.dtype.itemsize else loss


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute transformers' loss of a causal language model from logits, with `xent.cross_entropy`.

    Set ``model.loss_function = causal_lm_loss``. The model still computes all logits; this saves their float32 copy and
    the float32 copy of their gradient. `patch` saves the logits as well, and needs no loss function.

    Parameters
    ----------
    logits : tensor (..., T, V), float
        The final logits of the model, after its scale or softcap.
    labels : integer tensor (..., T), optional
        The tokens; position t predicts token t + 1. Ignored if ``shift_labels`` is given.
    vocab_size : int
        V.
    num_items_in_batch : int or 0-d tensor, optional
        The divisor of the sum over tokens: the token count over all micro-batches and ranks. By default, the number of
        tokens of this call that are not ignored.
    ignore_index : int
        Labels with this value are ignored.
    shift_labels : integer tensor (..., T), optional
        The target of each position, already shifted.
    **kwargs
        Other arguments that the model passes to its loss function. They are ignored, as in transformers.

    Returns
    -------
    loss : 0-d tensor, float32

    Raises
    ------
    ValueError
        There are no labels, or their number of positions differs from that of the logits.

    Examples
    --------
    >>> import torch
    >>> from xent.integrations.transformers import causal_lm_loss
    >>> causal_lm_loss(torch.zeros(1, 3, 8), torch.tensor([[1, 2, 3]]), vocab_size=8)
    tensor(2.0794)
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("labels or shift_labels must be given, got neither")
        shift_labels = F.pad(labels.long(), (0, 1), value=ignore_index)[..., 1:]
    target, rows = shift_labels.reshape(-1).to(logits.device), logits.numel() // vocab_size
    if len(target) != rows:
        raise ValueError(
            f"labels must hold one token for each of the {rows} positions of logits {tuple(logits.shape)}, "
            f"got {len(target)}"
        )
    mean = num_items_in_batch is None
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": "mean" if mean else "sum"}
    flat = logits.view(-1, vocab_size)
    loss: Any = deferred_loss(flat, target, **options)
    if loss is NotImplemented:
        loss = xent.cross_entropy(flat, target, **options)
    made: Tensor = loss if mean else loss / num_items_in_batch
    return made


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
