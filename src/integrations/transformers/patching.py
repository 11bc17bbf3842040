"""patch and unpatch: for one model, or for all models that are created later."""

import contextlib
import functools
import importlib
from typing import Any

from torch import nn

from xent.integrations.patch import Patch
from xent.integrations.transformers.changes import unwatch
from xent.integrations.transformers.heads import defer_logits, find_heads, find_owner, restore
from xent.integrations.transformers.history import forget, is_used, register
from xent.integrations.transformers.smoothing import smooth_from_hidden_states

__all__ = ["patch", "unpatch"]


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
    heads = find_heads(owner)
    _smooth()
    changed = [defer_logits(head) for head in heads]
    register(owner, heads)
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
    if model is None:
        kind = _hook_points()[0]
        kind.post_init = getattr(kind.post_init, "_xent_wraps", kind.post_init)
        _clean_up()
        return
    owner = find_owner(model)
    heads = find_heads(owner)
    for head in heads:
        restore(head)
    forget(owner, heads)
    _clean_up()


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


def _smooth() -> None:
    """Make the Trainer's label smoothing accept deferred logits. Its result for real logits does not change."""
    kind = _hook_points()[1]
    if not hasattr(kind.__call__, "_xent_wraps"):
        kind.__call__ = smooth_from_hidden_states(kind.__call__)


def _clean_up() -> None:
    """Restore what was replaced for all models, if none is patched any more."""
    unwatch()
    if not is_used():
        kind = _hook_points()[1]
        kind.__call__ = getattr(kind.__call__, "_xent_wraps", kind.__call__)


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
