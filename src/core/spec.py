"""One call, described once: frozen facts that validation produces and every backend reads. No framework in here."""

from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "DIFFERENTIABLE",
    "DIVERGENCE_STATS",
    "LARGEST",
    "LOG_PROB_STATS",
    "REDUCTIONS",
    "ROW_STATS",
    "STAT_NAMES",
    "BackendInfo",
    "Heads",
    "LinearCall",
    "LogitsCall",
    "LossSpec",
    "QuantizedWeight",
    "Shards",
    "Stats",
    "Support",
    "VocabParallel",
    "bounded",
]

REDUCTIONS = ("mean", "sum", "none")
DIFFERENTIABLE = ("lse", "nll", "entropy")
"""Statistics that carry gradients with reduction "none"."""
ROW_STATS = (*DIFFERENTIABLE, "predictions", "log_sum_sq_probs", "mean_logit")
STAT_NAMES = (*ROW_STATS, "z_loss", "accuracy", "count")
LOG_PROB_STATS = ("lse", "predictions", "log_sum_sq_probs", "mean_logit", "accuracy")
"""What the log-probability functions report beside their results, all of it per row."""
DIVERGENCE_STATS = ("entropy",)
"""What the divergences report beside their loss, all of it per row and without gradient."""


LARGEST = 1e30
"""A larger softcap bends nothing more, and a larger temperature makes nothing more alike. What is divided by this is
still a normal number in float32; devices may flush smaller ones to 0, and 0 / 0 is NaN."""


def bounded(value: Any) -> Any:
    """Return a softcap or temperature, `LARGEST` at most if it is a number."""
    return min(value, LARGEST) if isinstance(value, (int, float)) else value


@dataclass(frozen=True, eq=False)
class LossSpec:
    """The options that all functions share. `stats` keeps the order of `STAT_NAMES`."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    stats: tuple[str, ...] = ()
    exact: bool = False
    """Whether logits that the call computes must not be rounded below float32."""
    accuracy_of_rows: bool = False
    """Whether the accuracy is each row's, 1 or 0, rather than the share of rows."""

    def without_stats(self) -> "LossSpec":
        """Return the same without statistics."""
        return replace(self, stats=()) if self.stats else self


@dataclass(frozen=True, eq=False)
class LogitsCall:
    """A validated call on logits. `normalizer` is a float, a 0-d array or None.

    `temperature`, of the target's shape (in MLX perhaps 0-d), divides the logits of each row after scale and softcap; a
    temperature that is one number is in `loss.logit_scale` and `loss.softcap`.
    """

    logits: Any
    target: Any
    weight: Any
    sample_weight: Any
    normalizer: Any
    loss: LossSpec
    axis: int
    inplace: bool
    temperature: Any = None
    support: "Support | None" = None
    vocab_parallel: "Shards | None" = None


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A classifier (V, D) as `mlx.core.quantize` packs it, of a linear loss or a teacher. It gets no gradient.

    Products with it are `mlx.core.quantized_matmul`'s: it is never unpacked as a whole.

    Parameters
    ----------
    packed : uint32 MLX array (V, D * bits / 32)
        What `mlx.core.quantize` returns first; the `weight` of an `mlx.nn.QuantizedLinear` or `QuantizedEmbedding`.
    scales : MLX array (V, D / group_size)
        One for each group of `group_size` elements of a row.
    biases : MLX array, the shape of scales, optional
        What is added to each group; None for modes that have none.
    group_size, bits : int
        As they were given to `mlx.core.quantize`.
    mode : str
        As it was given to `mlx.core.quantize`.

    Examples
    --------
    >>> import xent
    >>> head = xent.QuantizedWeight(*mx.quantize(classifier, group_size=64, bits=4))  # doctest: +SKIP
    >>> loss = xent.linear_cross_entropy(hidden, head, labels)  # doctest: +SKIP
    """

    packed: Any
    scales: Any
    biases: Any = None
    group_size: int = 64
    bits: int = 4
    mode: str = "affine"

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D) of the weight that was packed."""
        return self.packed.shape[0], self.packed.shape[1] * 32 // self.bits


@dataclass(frozen=True, eq=False)
class LinearCall:
    """A validated call on hidden states and a classifier. `workspace` is in bytes; the rest as in `LogitsCall`.

    With `heads`, the first axis of `input` is theirs, the target has none, and `shift` is 0: see `xent.core.heads`.
    """

    input: Any
    linear_weight: Any
    linear_bias: Any
    target: Any
    weight: Any
    sample_weight: Any
    normalizer: Any
    loss: LossSpec
    shift: int
    workspace: int | None
    temperature: Any = None
    support: "Support | None" = None
    heads: "Heads | None" = None
    vocab_parallel: "Shards | None" = None


@dataclass(frozen=True)
class Heads:
    """Several heads of one classifier: how far ahead each predicts, and how much it counts, 1 each where None."""

    shift: tuple[int, ...]
    weight: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class Support:
    """The classes that each row may take: what a sampler with top-k, top-p or min-p left of the vocabulary.

    Row i of the N rows of `target`, in row-major order, has the classes ``ids[offsets[i]:offsets[i + 1]]``. Sums over
    the vocabulary are sums over these alone.

    Parameters
    ----------
    ids : integer array (M,)
        Classes in [0, V), each at most once in a row, in any order.
    offsets : integer array (N + 1,)
        Where each row begins; the last entry is M.

    Examples
    --------
    >>> import numpy as np, xent
    >>> support = xent.Support(ids=np.array([0, 2, 1]), offsets=np.array([0, 2, 3]))
    >>> xent.log_probs(np.zeros((2, 3)), np.array([0, 1]), support=support).round(4)
    array([-0.6931,  0.    ])
    """

    ids: Any
    offsets: Any


@dataclass(frozen=True, eq=False)
class VocabParallel:
    """A vocabulary in shards: this rank of a process group holds the classes [first, first + rows) of `size`.

    The shard is what the call gets as logits (..., rows), or as classifier (rows, D), bias (rows,), class weights
    (rows,) and class probabilities (..., rows). Everything else, targets above all, is the same on every rank. So are
    the loss and the statistics, bit by bit. Every rank of the group has to make the call.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, or torch.distributed.DeviceMesh of one dimension
        The ranks that hold a shard each.
    first : int, optional
        The shard's first class. By default shards follow each other in the order of ranks, as DTensor and torch.chunk
        cut a vocabulary. Either all ranks name theirs or none.
    size : int, optional
        V, how many classes there are. Rows of a shard beyond are padding: they have no probability and no gradient. By
        default no shard has padding. To be given also where one group has two vocabularies whose shards are of one size
        on some ranks and not on all: ranks remember a layout by their own shard.
    sequence_parallel : bool
        Whether the `input` of a linear loss holds this rank's tokens alone, (..., T_r, D), cut along that axis as
        torch.chunk cuts T; target and sample weights are those of all tokens. Hidden states are gathered, and their
        gradient is reduced and scattered.

    Examples
    --------
    >>> import xent
    >>> group = torch.distributed.new_group([0, 1])  # doctest: +SKIP
    >>> loss = xent.linear_cross_entropy(hidden, shard, labels, vocab_parallel=group)  # doctest: +SKIP
    >>> padded = xent.VocabParallel(group, size=50257)  # doctest: +SKIP
    >>> loss = xent.cross_entropy(logits, labels, vocab_parallel=padded)  # doctest: +SKIP
    """

    group: Any
    first: int | None = None
    size: int | None = None
    sequence_parallel: bool = False


@dataclass(frozen=True, eq=False)
class Shards:
    """A validated `VocabParallel`, or what the placements of DTensors say in its place."""

    group: Any
    first: int | None
    size: int | None
    axis: int | None
    """The axis of the hidden states along which tokens are cut; None where every rank has all tokens."""
    reduces: bool = True
    """Whether the gradient of the hidden states is summed over ranks by the call."""


@dataclass(frozen=True, eq=False)
class Stats:
    """What the call was asked to report beside its results; a field that was not asked for is None.

    With reduction "none" lse, nll and entropy carry gradients; nothing else does. What a divergence reports does not.

    Rows are the positions of `target`; a row whose target is `ignore_index` (or that `shift` leaves without a target)
    is not counted and holds 0, or -1 for predictions. x are the logits after scale, softcap and temperature. With a
    support, classes are those of the row's support.

    Attributes
    ----------
    lse : array, target's (index) shape, the loss's dtype
        log sum_c exp(x_c).
    nll : array, target's (index) shape, the loss's dtype
        lse - x_y in nats, without weights, smoothing or z-loss; sum_c q_c (lse - x_c) for class probabilities q.
    entropy : array, target's (index) shape, the loss's dtype
        -sum_c p_c log p_c in nats, p = softmax(x).
    predictions : array, target's (index) shape, int64 (int32 in MLX)
        The class of the largest logit, the lowest index among equals.
    log_sum_sq_probs : array, target's (index) shape, the loss's dtype
        log sum_c p_c^2; minus the Renyi entropy of order 2.
    mean_logit : array, target's (index) shape, the loss's dtype
        The mean of x_c over classes.
    z_loss : 0-d array, the loss's dtype; target's (index) shape with reduction "none"
        The share of the returned loss that the z term makes, reduced as the loss is.
    accuracy : 0-d array, the loss's dtype
        The share of counted rows whose prediction is the target (the most probable class, for class probabilities),
        in [0, 1]; 0 when no row counts. From the log-probability functions: of each row, 1 or 0, target's shape.
    count : 0-d array, int64 (int32 in MLX)
        How many rows count.
    """

    lse: Any = None
    nll: Any = None
    entropy: Any = None
    predictions: Any = None
    log_sum_sq_probs: Any = None
    mean_logit: Any = None
    z_loss: Any = None
    accuracy: Any = None
    count: Any = None


@dataclass(frozen=True)
class BackendInfo:
    """One line of `xent.backends()`: a backend and, where it is not available, the reason why not."""

    name: str
    framework: str
    available: bool
    reason: str | None
    versions: dict[str, str]
    devices: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Which fast paths are on or off and why, and what "auto" waits for."""
