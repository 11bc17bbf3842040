"""patch and unpatch: one model, or all that are made from now on."""

import contextlib
import functools
import importlib
from types import TracebackType
from typing import Any

from torch import nn

from xent.integrations.transformers.heads import defer_logits, find_heads, find_owner, restore
from xent.integrations.transformers.history import forget, register
from xent.integrations.transformers.smoothing import smooth_from_hidden_states

__all__ = ["Patch", "patch", "unpatch"]


class Patch:
    """What `patch` returns: used in a `with` statement, it undoes the patch at the end, unless there was one before."""

    def __init__(self, model: Any, changed: bool) -> None:
        self._model = model
        self._changed = changed

    def __enter__(self) -> Any:
        """Return the model, or None for all models."""
        return self._model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo the patch."""
        if self._changed:
            unpatch(self._model)


def patch(model: nn.Module | None = None) -> Patch:
    """Compute a transformers model's loss from its hidden states, without its logits.

    The head returns logits that are computed only if somebody looks at them. Scaling and soft-capping between head
    and loss are taken into the loss. ``outputs.logits``, generation and metrics get the logits that the model would
    have made; so does any function that xent does not know. Nothing else of the model changes: not its class, its
    parameters nor its checkpoints. The first training step that computes logits all the same warns, and `explain` says
    what made it do so.

    Parameters
    ----------
    model : transformers.PreTrainedModel, optional
        A model with a language-model head, or a PEFT, DDP or FSDP2 wrapper around one. Without it, every model that is
        made later, by its class or by ``from_pretrained``; models whose head cannot be patched stay as they are.
        A PEFT adapter on the head itself is found only if the model is patched after the adapter was added. So is a
        tensor-parallel plan of transformers: its head keeps its classes in shards, and its logits are not gathered.

    Returns
    -------
    Patch
        To be used in a ``with`` statement, or not at all.

    Raises
    ------
    ValueError
        The model has no head that can be deferred. It is left as it was.
    ImportError
        transformers is older than 5, or has none of the places that this hooks into.

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
        return Patch(None, _patch_all())
    owner = find_owner(model)
    heads = find_heads(owner)
    _smooth()
    changed = [defer_logits(head) for head in heads]
    register(owner, heads)
    return Patch(model, any(changed))


def unpatch(model: nn.Module | None = None) -> None:
    """Undo `patch`: give a model its own head back; without a model, leave those alone that are made from now on.

    Parameters
    ----------
    model : transformers.PreTrainedModel, optional
        The model that was patched. One that was not stays as it is.

    Raises
    ------
    ValueError
        The model has no head that could have been patched.
    """
    if model is None:
        kind = _hook_points()[0]
        kind.post_init = getattr(kind.post_init, "_xent_wraps", kind.post_init)
        return
    owner = find_owner(model)
    heads = find_heads(owner)
    for head in heads:
        restore(head)
    forget(owner, heads)


def _patch_all() -> bool:
    """Patch models when they are made; return whether that was not done before."""
    kind = _hook_points()[0]
    post_init = kind.post_init
    if hasattr(post_init, "_xent_wraps"):
        return False

    @functools.wraps(post_init)
    def post_init_and_patch(self: Any) -> None:
        post_init(self)
        with contextlib.suppress(ValueError):  # no head, or one that computes its logits as before
            patch(self)

    post_init_and_patch._xent_wraps = post_init  # type: ignore[attr-defined]
    kind.post_init = post_init_and_patch
    return True


def _smooth() -> None:
    """Have the Trainer's label smoothing take deferred logits as they are; real logits go the way they went."""
    kind = _hook_points()[1]
    if not hasattr(kind.__call__, "_xent_wraps"):
        kind.__call__ = smooth_from_hidden_states(kind.__call__)


def _hook_points() -> tuple[Any, Any]:
    """Return the classes that are hooked into, or raise ImportError."""
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
        "call xent.linear_cross_entropy in the place of head and loss"
    )
