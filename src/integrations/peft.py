"""The head of a PEFT model in a loop of your own: one weight, and hidden states for it, that include the adapter.

`xent.linear_cross_entropy(hidden, model.lm_head.weight, labels)` would leave LoRA out. PEFT's own forward says what the
head computes: it runs with parts that defer their products, and these are then put side by side.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from xent.integrations.transformers.calls import factors
from xent.integrations.transformers.deferred import is_open
from xent.integrations.transformers.patching import history_of, patch

__all__ = ["head"]


def head(module: nn.Module, input: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight and bias whose product is what a head with adapters computes.

    ``module(input)`` equals ``torch.nn.functional.linear(*head(module, input))``, without the logits: pass the three to
    `xent.linear_cross_entropy`, `xent.linear_log_probs` or a `xent.LinearTeacher`. A LoRA adapter of rank r adds r
    columns to hidden states and weight; the weight is then a copy. Adapters of another dtype are converted to that of
    the head. Trained tokens replace rows in a copy of the weight. Gradients reach the adapters.

    Parameters
    ----------
    module : torch.nn.Module
        The head: ``model.get_output_embeddings()``. A plain torch.nn.Linear is returned as it is.
    input : tensor (..., D), float
        Hidden states.

    Returns
    -------
    input : tensor (..., D + r), float
    linear_weight : tensor (V, D + r), float
    linear_bias : tensor (V,), float, or None

    Raises
    ------
    TypeError
        The head is no sum of such products, for example with DoRA.
    ValueError
        There is no torch.nn.Linear in it.

    Examples
    --------
    >>> import peft, torch, xent
    >>> from xent.integrations.peft import head
    >>> model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 100)), peft.LoraConfig(target_modules=["0"]))
    >>> input, weight, bias = head(model.base_model.model[0], torch.zeros(2, 5, 8))
    >>> input.shape, weight.shape
    (torch.Size([2, 5, 16]), torch.Size([100, 16]))
    >>> labels = torch.zeros(2, 5, dtype=torch.int64)
    >>> loss = xent.linear_cross_entropy(input, weight, labels, linear_bias=bias, shift=1)
    """
    owner: Any = nn.Module()
    owner.lm_head, owner.get_output_embeddings = module, lambda: module
    with nullcontext() if any(map(history_of, module.modules())) else patch(owner), torch.enable_grad():
        history = next(filter(None, map(history_of, module.modules())))
        logits = module(input)
    if not is_open(logits):
        reason = history.last[module.training].computed
        raise TypeError(
            f"module must compute a sum of products of hidden states with weights, and {type(module).__module__}."
            f"{type(module).__name__} does not: {reason}. Merge the adapter, or pass module(input) to "
            "xent.cross_entropy"
        )
    recipe = logits._recipe
    return factors(recipe, recipe.hidden, recipe.weights, recipe.bias)
