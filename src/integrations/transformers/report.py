"""`explain`: report in words whether a model uses the fused path."""

from typing import Any

from torch import nn

from xent.integrations.transformers.heads import DeferringHead, find_heads, find_owner
from xent.integrations.transformers.history import Call, history_of, why_unused
from xent.integrations.transformers.replaced import trl_computes_with

__all__ = ["explain"]

_TRL = {
    whose: f"Its forward is TRL's: where TRL's trainers call it with fused_lm_head=True, {words}."
    for whose, words in {
        "xent": "xent computes log-probabilities from hidden states, without logits",
        "trl": "kernels of TRL's compute log-probabilities from hidden states, until you call "
        "xent.integrations.trl.patch()",
    }.items()
}
"""Texts for a model whose forward TRL replaced, by the library that computes its log-probabilities."""


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
    CohereForCausalLM is patched: its head lm_head (16 to 64) defers its logits.
    Training: fused. Between head and loss: multiplied by 0.5.
    Evaluation: none has been seen.
    """
    owner = find_owner(model)
    name = type(owner).__name__
    try:
        heads: list[Any] = find_heads(owner)
    except ValueError as error:
        return f"{name} is not patched: {error}"
    patched: list[Any] = [
        head for head in heads if isinstance(head, DeferringHead) and not hasattr(head, "_xent_restored")
    ]
    history, trl = history_of(owner), _TRL.get(trl_computes_with(owner) or "")
    if not patched and trl is not None:
        return f"{name} is not patched. {trl}"
    if not patched:
        why = (
            "you call patch(model)"
            if history is None
            else "you call patch(model) again, because its head was replaced (resize_token_embeddings does so)"
        )
        return f"{name} is not patched: its training takes the memory of its logits until {why}."
    names = {module: key for key, module in owner.named_modules(remove_duplicate=False)}
    listed = " and ".join([f"{names[head]} ({head.in_features} to {head.out_features})" for head in patched])
    lines = [
        f"{name} is patched: its head {listed} defers its logits."
        if len(patched) == 1
        else f"{name} is patched: its heads {listed} defer their logits."
    ]
    history = vars(patched[0]).get("_xent_history") if history is None else history
    if history is None:
        return f"{lines[0]} Nothing was noted of it, because patch was not called with it."
    for kind, call in (("Training", history.training), ("Evaluation", history.evaluation)):
        if call is not None or trl is None:  # TRL's forward does not call the head
            lines.append(f"{kind}: {_words(call)}")
    if trl is not None:
        lines.append(trl)
    elif history.went_past:
        lines.append(f"An optimizer stepped without a call of the head: {why_unused(owner)}.")
    return "\n".join(lines)


def _words(call: Call | None) -> str:
    if call is None:
        return "none has been seen."
    how = "compiled, and " if call.compiled else ""
    if call.fused is not None:
        between = f" Between head and loss: {call.fused}." if call.fused else ""
        after = f" The logits were computed besides: {call.computed}." if call.computed else ""
        return f"{how}fused.{between}{after}"
    if call.computed is not None:
        return f"{how}not fused: {call.computed}."
    return f"{how}logits were deferred, and no loss of them was taken."
