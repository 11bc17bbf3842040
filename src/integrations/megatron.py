"""Megatron-LM's two vocabulary-parallel losses, with its names and signatures, computed by `xent.cross_entropy`.

    from xent.integrations.megatron import fused_vocab_parallel_cross_entropy, vocab_parallel_cross_entropy

Megatron need not be installed. Differences from Megatron:

- Label smoothing: Megatron averages log-probabilities over the classes of each rank, so that ranks have different
  losses. Here the average is over all classes, as Megatron computes it on one rank.
- A target that is not a class has loss 0 and no gradient. In Megatron its loss is log sum exp, which a loss mask is
  expected to remove.
- The logits are not modified.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from xent.api import cross_entropy
from xent.core.spec import VocabParallel

__all__ = ["fused_vocab_parallel_cross_entropy", "vocab_parallel_cross_entropy"]

_NO_CLASS = -100


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Compute the loss of each token from logits whose classes are in shards.

    This equals `megatron.core.tensor_parallel.vocab_parallel_cross_entropy` on one rank: with smoothing a, the target
    has probability 1 - a and each other class a / (V - 1). V is the number of classes on all ranks, padding included.

    Parameters
    ----------
    vocab_parallel_logits : float tensor (T, B, V / ranks)
        This rank's classes, [rank * V / ranks, (rank + 1) * V / ranks). Any leading axes.
    target : integer tensor (T, B)
        Classes in [0, V), the same on every rank. Other values have loss 0.
    label_smoothing : float in [0, (V - 1) / V]
        The smoothing a.
    tp_group : torch.distributed.ProcessGroup, optional
        The ranks, each of which has one shard. None means Megatron's tensor-parallel group, if Megatron is initialised.

    Returns
    -------
    loss : float32 tensor (T, B)
        The same bits on every rank.

    Raises
    ------
    ValueError, TypeError
        As in `xent.cross_entropy`; also if no group is given and Megatron has none.

    Examples
    --------
    >>> from xent.integrations.megatron import vocab_parallel_cross_entropy
    >>> loss = vocab_parallel_cross_entropy(logits, labels, 0.1, tp_group)  # doctest: +SKIP
    """
    group = _megatrons_group() if tp_group is None else tp_group
    rows, ranks = vocab_parallel_logits.shape[-1], group.size()
    vocabulary = rows * ranks
    smoothing = label_smoothing * vocabulary / (vocabulary - 1) if label_smoothing else 0.0
    if not 0 <= smoothing <= 1:
        raise ValueError(
            f"label_smoothing must be in [0, {(vocabulary - 1) / vocabulary:.6g}] for {vocabulary} classes, got "
            f"{label_smoothing!r}"
        )
    loss: Tensor = cross_entropy(
        vocab_parallel_logits,
        torch.where((target >= 0) & (target < vocabulary), target.long(), _NO_CLASS),
        reduction="none",
        label_smoothing=smoothing,
        ignore_index=_NO_CLASS,
        vocab_parallel=VocabParallel(group, first=group.rank() * rows, size=vocabulary),
    )
    return loss


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    """Compute the loss of each token from logits whose classes are in shards.

    This equals `megatron.core.fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy`:
    `vocab_parallel_cross_entropy` without smoothing.

    Parameters
    ----------
    vocab_parallel_logits, target, tp_group
        As in `vocab_parallel_cross_entropy`.

    Returns
    -------
    loss : float32 tensor (T, B)

    Raises
    ------
    ValueError, TypeError
        As in `vocab_parallel_cross_entropy`.

    Examples
    --------
    >>> from xent.integrations.megatron import fused_vocab_parallel_cross_entropy
    >>> loss = fused_vocab_parallel_cross_entropy(logits, labels, tp_group)  # doctest: +SKIP
    """
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, 0.0, tp_group)


def _megatrons_group() -> Any:
    """Return Megatron's tensor-parallel group, if Megatron has been imported and initialised."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None:
        raise ValueError("tp_group must be a process group: megatron.core is not imported, so that there is no default")
    return state.get_tensor_model_parallel_group()
