"""Replacements of verl's two fused LM heads, with the same signatures, computed by xent.

The signatures are those of verl 0.9.1: `verl.utils.kernel.linear_cross_entropy.linear_cross_entropy` (verl's setting
``impl_backend: triton``) and `verl.utils.experimental.torch_functional.FusedLinearForPPO` (``torch`` and ``liger``).
verl's models for transformers import them when they are called, so that one line replaces each::

    verl.utils.kernel.linear_cross_entropy.linear_cross_entropy = xent.integrations.verl.linear_cross_entropy
    verl.utils.experimental.torch_functional.FusedLinearForPPO = xent.integrations.verl.FusedLinearForPPO

verl's modules for Megatron import the function by name when they are loaded: run the first line before that.
"""

from typing import Any

import torch
from torch import Tensor

import xent

__all__ = ["FusedLinearForPPO", "linear_cross_entropy"]

_REDUCTIONS = ("none", "sum", "mean")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies from hidden states, with the signature of verl's function.

    Despite its name it returns log-probabilities, which are at most 0, not a loss.

    Parameters
    ----------
    hidden : tensor (..., D), float
        Hidden states of N tokens.
    weight : tensor (V, D), float
        The classifier.
    labels : integer tensor (...)
        Classes in [0, V). A token with -100 has zeros, and no gradient.
    temperature : float > 0, or None for 1
        Divides the logits.
    reduction : "none", "sum" or "mean", in any case; None is "none"
        The reduction of the log-probabilities. The mean is over all N tokens.
    dist_process_group : torch.distributed.ProcessGroup, optional
        The tensor-parallel group. Each of its R ranks passes its own rows of the classifier as ``weight``, V / R in the
        order of ranks, and the same hidden states and labels.

    Returns
    -------
    log_probs : tensor, float32 (float64 for float64 inputs, like entropy)
        (N,) for "none", 0-d for the others. Differentiable. With a group, results are the same on every rank, and the
        gradient of the hidden states is 1 / R of the whole: Megatron's layers before the head add it up over ranks.
    entropy : tensor (N,), float32
        One value per token for every reduction. Differentiable.

    Raises
    ------
    TypeError, ValueError, IndexError
        As in `xent.linear_log_probs`; also for another reduction.

    Examples
    --------
    >>> import torch
    >>> from xent.integrations.verl import linear_cross_entropy
    >>> log_probs, entropy = linear_cross_entropy(torch.zeros(1, 3, 8), torch.zeros(4, 8), torch.tensor([[0, 1, 2]]))
    >>> log_probs, entropy
    (tensor([-1.3863, -1.3863, -1.3863]), tensor([1.3863, 1.3863, 1.3863]))
    """
    shards, rows = None, len(weight)
    if dist_process_group is not None:
        ranks = dist_process_group.size()
        shards = xent.VocabParallel(dist_process_group, first=dist_process_group.rank() * rows, size=ranks * rows)
        hidden = hidden.view_as(hidden)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / ranks)
    how = "none" if reduction is None else str(reduction).lower()
    if how not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, _REDUCTIONS))} or None, got {reduction!r}")
    log_probs, entropy = xent.linear_log_probs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        temperature=1.0 if temperature is None else temperature,
        entropy=True,
        vocab_parallel=shards,
    )
    if how != "none":
        tokens = max(len(log_probs), 1)
        log_probs = log_probs.sum() / (tokens if how == "mean" else 1)
    return log_probs, entropy


class FusedLinearForPPO(torch.nn.Module):
    """Compute log-probabilities and entropies from hidden states, with the signature of verl's module.

    Parameters
    ----------
    chunk_size : int
        Ignored; xent chooses.
    impl_backend : str
        Ignored; the device of the tensors selects the backend.

    Examples
    --------
    >>> import torch
    >>> from xent.integrations.verl import FusedLinearForPPO
    >>> log_probs, entropy = FusedLinearForPPO()(torch.zeros(1, 3, 8), torch.zeros(4, 8), torch.tensor([[0, 1, 2]]))
    >>> log_probs
    tensor([[-1.3863, -1.3863, -1.3863]])
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies.

        Parameters
        ----------
        hidden_states : tensor (..., D), float
            Hidden states of N tokens.
        vocab_weights : tensor (V, D), float
            The classifier.
        input_ids : integer tensor (...)
            The tokens to predict: verl has shifted them. A token with -100 has zeros, and no gradient.
        temperature : float > 0, or a 0-d tensor
            Divides the logits.

        Returns
        -------
        log_probs, entropy : tensor, float32
            Both of the shape of ``input_ids``, and differentiable.
        """
        log_probs, entropy = xent.linear_log_probs(
            hidden_states, vocab_weights, input_ids, temperature=temperature, entropy=True
        )
        return log_probs, entropy
