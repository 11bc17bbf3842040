"""How a model of transformers computes its loss: unchanged, or with a fused loss in place of its head.

`make` returns a context manager. Within it the function that it gives computes the loss of tokens and labels;
afterwards the model is as before, so that all implementations share one model. Only the head and the loss differ:
norms, attention and the rest are those of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.contenders.entry import contender, find_peer
from benchmarks.contenders.pytorch import chunked_options
from benchmarks.process import Absent

if TYPE_CHECKING:
    from torch import Tensor

__all__: list[str] = []

_Loss = Callable[["Tensor", "Tensor"], "Tensor"]


def _variant(name: str, **facts: Any) -> Callable[[Callable[[Any], Iterator[_Loss]]], None]:
    """Add the decorated function as a contender."""
    return lambda enter: contender(name, "training", **facts)(lambda case: contextmanager(enter)) and None


def _own_loss(model: Any) -> _Loss:
    return lambda tokens, labels: model(tokens, labels=labels).loss


def _hidden_states(model: Any, tokens: Tensor) -> Tensor:
    hidden: Tensor = model.get_decoder()(tokens, use_cache=False).last_hidden_state
    return hidden


@_variant("plain")
def _plain(model: Any) -> Iterator[_Loss]:
    yield _own_loss(model)


@_variant("xent", kind="ours")
def _xent(model: Any) -> Iterator[_Loss]:
    from xent.integrations.transformers import patch

    with patch(model):
        yield _own_loss(model)


@_variant("Liger")
def _liger(model: Any) -> Iterator[_Loss]:
    """Patch the instance as Liger-Kernel's documentation says, with its fused loss and none of its other kernels."""
    apply = find_peer(
        "liger_kernel.transformers", f"apply_liger_kernel_to_{model.config.model_type}", model.device.type
    )
    kernels = [name for name in inspect.signature(apply).parameters if name != "model"]
    apply(**{name: name == "fused_linear_cross_entropy" for name in kernels}, model=model)
    try:
        yield _own_loss(model)
    finally:
        del model.forward  # that of the instance; the class has its own


@_variant("CCE")
def _cce(model: Any) -> Iterator[_Loss]:
    """Call the function on the hidden states, as `cce_patch` does, which the package on PyPI does not contain."""
    function = find_peer("cut_cross_entropy", "linear_cross_entropy", model.device.type)
    softcap = getattr(model.config, "final_logit_softcapping", None)
    head = model.get_output_embeddings()
    yield lambda tokens, labels: function(
        _hidden_states(model, tokens), head.weight, labels, shift=True, softcap=softcap
    )


@_variant("torch")
def _torch(model: Any) -> Iterator[_Loss]:
    """Call PyTorch's chunked operator on the hidden states."""
    from torch.nn import functional

    options = chunked_options()
    if getattr(model.config, "final_logit_softcapping", None) is not None:
        raise Absent("torch's linear_cross_entropy has no softcap")
    head = model.get_output_embeddings()

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = _hidden_states(model, tokens)[:, :-1].flatten(0, 1)
        return functional.linear_cross_entropy(hidden, head.weight, labels[:, 1:].flatten(), options=options)

    yield loss
