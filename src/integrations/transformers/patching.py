"""patch and unpatch, for one model or for all models that are created later, and explain."""

import contextlib
import functools
import importlib
from typing import Any

from torch import nn

from xent.integrations.patch import Patch
from xent.integrations.transformers.changes import unwatch
from xent.integrations.transformers.heads import defer_logits, find_heads, find_owner, restore
from xent.integrations.transformers.history import Call, forget, history_of, register, trl_computes_with, why_unused
from xent.integrations.transformers.loss import smooth_from_hidden_states

__all__ = ["explain", "patch", "unpatch"]


def patch(model: nn.Module | None = None) -> Patch:
    """Compute a transformers model's loss from its hidden states, without its logits.

    The head then returns deferred logits, which are computed only if something reads them. A scale or a softcap between
    head and loss becomes part of the loss. ``outputs.logits``, generation, metrics, and every function that xent does
    not know get the logits of the unpatched model. Nothing else of the model changes: not its class, its parameters or
    its checkpoints. If a training step computes logits all the same, the first one emits a warning, and `explain` says
    why.

    Parameters
    ----------
    model : transformers.PreTrainedModel, optional
        A model with a language-model head, or a PEFT, DDP or FSDP2 wrapper around one. Without it, every model that is
        created later is patched, by its class or by ``from_pretrained``; models whose head cannot be patched stay
        unchanged. Patch a model after adding a PEFT adapter to the head itself, and after loading it with a
        tensor-parallel plan of transformers. With a plan the classes stay in shards and the logits are not gathered.

    Returns
    -------
    Patch
        A context manager that undoes the patch. It may be ignored.

    Raises
    ------
    ValueError
        The model has no head whose logits can be deferred. It is unchanged.
    ImportError
        transformers is older than 5, or does not have the classes that are patched.

    Examples
    --------
    >>> import torch, transformers
    >>> from xent.integrations.transformers import patch
    >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...                                   num_attention_heads=2)
    >>> model, tokens = transformers.LlamaForCausalLM(config), torch.arange(8)[None]
    >>> plain = model(tokens, labels=tokens).loss
    >>> with patch(model):
    ...     fused = model(tokens, labels=tokens).loss
    >>> torch.testing.assert_close(fused, plain)
    """
    if model is None:
        return Patch(unpatch if _patch_all() else None)
    owner = find_owner(model)
    heads, smoother = find_heads(owner), _hook_points()[1]
    if not hasattr(smoother.__call__, "_xent_wraps"):
        smoother.__call__ = smooth_from_hidden_states(smoother.__call__)
    history = register(owner, heads)
    changed = [defer_logits(head, history) for head in heads]
    return Patch(functools.partial(unpatch, model) if any(changed) else None, model)


def unpatch(model: nn.Module | None = None) -> None:
    """Undo `patch`: restore the head of a model. Without a model, stop patching models that are created later.

    Parameters
    ----------
    model : transformers.PreTrainedModel, optional
        The patched model. A model that is not patched stays unchanged.

    Raises
    ------
    ValueError
        The model has no head that can be patched.
    """
    kind, smoother = _hook_points()
    if model is None:
        kind.post_init = getattr(kind.post_init, "_xent_wraps", kind.post_init)
    else:
        owner = find_owner(model)
        for head in find_heads(owner):
            restore(head)
        forget(owner)
    if unwatch():
        smoother.__call__ = getattr(smoother.__call__, "_xent_wraps", smoother.__call__)


def _patch_all() -> bool:
    """Patch all models when they are created; return whether this was off before."""
    kind = _hook_points()[0]
    post_init = kind.post_init
    if hasattr(post_init, "_xent_wraps"):
        return False

    @functools.wraps(post_init)
    def post_init_and_patch(self: Any) -> None:
        post_init(self)
        with contextlib.suppress(ValueError):  # no head, or one that cannot be patched
            patch(self)

    post_init_and_patch._xent_wraps = post_init  # type: ignore[attr-defined]
    kind.post_init = post_init_and_patch
    return True


def _hook_points() -> tuple[Any, Any]:
    """Return the classes of transformers that are patched; raise ImportError if they do not exist."""
    transformers: Any = importlib.import_module("transformers")
    version = transformers.__version__
    with contextlib.suppress(ImportError, AttributeError):
        model = transformers.PreTrainedModel
        smoother = importlib.import_module("transformers.trainer_pt_utils").LabelSmoother
        complete = hasattr(model, "post_init") and hasattr(model, "get_output_embeddings")
        if int(version.partition(".")[0]) >= 5 and complete:
            return model, smoother
    raise ImportError(
        f"xent.integrations.transformers needs transformers 5, found {version}: pip install 'transformers>=5', or "
        "call xent.linear_cross_entropy instead of head and loss"
    )


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
    patched = [head for head in heads if "_xent_history" in vars(head)]
    trl = _TRL.get(trl_computes_with(owner) or "")
    if not patched and trl is not None:
        return f"{name} is not patched. {trl}"
    if not patched:
        why = (
            "you call patch(model)"
            if history_of(owner) is None
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
    history = patched[0]._xent_history
    for kind, call in (("Training", history.last.get(True)), ("Evaluation", history.last.get(False))):
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
