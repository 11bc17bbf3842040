"""explain: whether a model computes its loss without logits, and if not, why not."""

from typing import Any

from torch import nn

from xent.integrations.transformers.patching import find_heads, find_owner, history_of, why_unused
from xent.integrations.trl import COMPUTES, computes_with

__all__ = ["explain"]


def explain(model: nn.Module) -> str:
    """Say whether training and evaluation of a model compute their loss without logits, and if not, why not.

    The report is about the last forward pass in training and in evaluation: the operations between head and loss, or
    the function that read the logits and the line of code that called it. `explain` itself does not run the model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A patched or unpatched model, or a wrapper around one.

    Returns
    -------
    text : str
        A few lines to print.

    Raises
    ------
    ValueError
        The model is not one of transformers.

    Examples
    --------
    >>> import torch, transformers
    >>> from xent.integrations.transformers import explain, patch
    >>> config = transformers.CohereConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...                                    num_attention_heads=2, logit_scale=0.5)
    >>> model, tokens = transformers.CohereForCausalLM(config), torch.arange(8)[None]
    >>> with patch(model):
    ...     loss = model(tokens, labels=tokens).loss
    ...     print(explain(model))
    CohereForCausalLM is patched, and its head defers its logits: lm_head (16 to 64).
    Training: fused. Between head and loss: multiplied by 0.5.
    Evaluation: none has been seen.
    """
    owner = find_owner(model)
    name, trl = type(owner).__name__, COMPUTES.get(computes_with(owner))
    patched = {key: module for key, module in owner.named_modules() if "xent_history" in vars(module)}
    if not patched:
        if trl:
            return f"{name} is not patched. {trl}"
        if history_of(owner) is not None:
            return f"{name} is not patched any more: {why_unused(owner)}."
        try:
            find_heads(owner)
        except ValueError as error:
            return f"{name} is not patched: {error}"
        return f"{name} is not patched: its training takes the memory of its logits until you call patch(model)."
    listed = ", ".join([f"{key} ({head.in_features} to {head.out_features})" for key, head in patched.items()])
    lines = [f"{name} is patched, and its head defers its logits: {listed}."]
    history = next(iter(patched.values())).xent_history
    for kind, training in (("Training", True), ("Evaluation", False)):
        call = history.last.get(training)
        if call is not None or not trl:  # TRL's forward does not call the head
            lines.append(f"{kind}: {_words(call)}")
    if trl:
        lines.append(trl)
    elif history.went_past:
        lines.append(f"An optimizer stepped without a call of the head: {why_unused(owner)}.")
    return "\n".join(lines)


def _words(call: Any) -> str:
    if call is None:
        return "none has been seen."
    how = "compiled, and " if call.compiled else ""
    if call.fused is None:
        why = "logits were deferred, and no loss of them was taken."
        return f"{how}not fused: {call.computed}." if call.computed else how + why
    between = f" Between head and loss: {call.fused}." if call.fused else ""
    after = f" The logits were computed besides: {call.computed}." if call.computed else ""
    return f"{how}fused.{between}{after}"
