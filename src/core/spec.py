"""Public descriptions of arguments and results, and the exception of xent. Imports no framework."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "DIFFERENTIABLE",
    "DIVERGENCES",
    "DIVERGENCE_STATS",
    "LARGEST",
    "LOG_PROB_STATS",
    "REDUCTIONS",
    "ROW_STATS",
    "STAT_NAMES",
    "TAILS",
    "Array",
    "BackendError",
    "BackendInfo",
    "Group",
    "LinearTeacher",
    "QuantizedRows",
    "QuantizedWeight",
    "Scalar",
    "Stats",
    "Subset",
    "Support",
    "Teacher",
    "TopKTeacher",
    "VocabParallel",
    "bounded",
]

Array = Any
"""An array of PyTorch, MLX or NumPy. No type says what the three have in common; in a plan it is an `ArraySlot`."""
Scalar = Any
"""A number, or a 0-d array where an option takes one; in a plan it may be a `NumberSlot`."""
Group = Any
"""A process group of PyTorch, a DeviceMesh of one dimension, or a `VocabParallel` of one; None without shards."""

REDUCTIONS = ("mean", "sum", "none")
DIVERGENCES = ("kl", "tv")
DIFFERENTIABLE = ("lse", "nll", "entropy")
"""Statistics that have gradients with reduction "none"."""
ROW_STATS = (*DIFFERENTIABLE, "predictions", "log_sum_sq_probs", "mean_logit")
STAT_NAMES = (*ROW_STATS, "z_loss", "accuracy", "count")
LOG_PROB_STATS = ("lse", "predictions", "log_sum_sq_probs", "mean_logit", "accuracy", "rank")
"""Statistics of the log-probability functions, one value per row each."""
DIVERGENCE_STATS = ("entropy",)
"""Statistics of the divergences, one value per row each, without gradient."""


TAILS = ("bucket", "renormalize", "drop")
LARGEST = 1e30
"""The largest softcap or temperature that is used. A larger one would not change the result, and a quotient by it could
be a denormal float32 number, which devices may flush to 0; 0 / 0 is NaN."""


def bounded(value: Scalar) -> Scalar:
    """Return a softcap or temperature, at most `LARGEST` if it is a number."""
    return min(value, LARGEST) if isinstance(value, (int, float)) else value


class BackendError(RuntimeError):
    """The named backend, or every backend, cannot serve this call. The message says why, and what could."""


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A classifier (V, D), packed by `mlx.core.quantize`, for a linear loss or a teacher. It gets no gradient.

    Matrix products use `mlx.core.quantized_matmul`; the classifier is never dequantized as a whole.

    Parameters
    ----------
    packed : uint32 MLX array (V, D * bits / 32)
        The first result of `mlx.core.quantize`; the `weight` of an `mlx.nn.QuantizedLinear` or `QuantizedEmbedding`.
    scales : MLX array (V, D / group_size)
        The factor of each group of `group_size` elements of a row.
    biases : MLX array, the shape of scales, optional
        The offset of each group; None for modes without offsets.
    group_size, bits : int
        As passed to `mlx.core.quantize`.
    mode : str
        As passed to `mlx.core.quantize`.

    Examples
    --------
    >>> import xent
    >>> head = xent.QuantizedWeight(*mx.quantize(classifier, group_size=64, bits=4))  # doctest: +SKIP
    >>> loss = xent.linear_cross_entropy(hidden, head, labels)  # doctest: +SKIP
    """

    packed: Array
    scales: Array
    biases: Array = None
    group_size: int = 64
    bits: int = 4
    mode: str = "affine"

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D) of the weight before packing."""
        return self.packed.shape[0], self.packed.shape[1] * 32 // self.bits

    def __getitem__(self, ids: Array) -> "QuantizedWeight":
        """Return the rows of these classes."""
        biases = None if self.biases is None else self.biases[ids]
        return replace(self, packed=self.packed[ids], scales=self.scales[ids], biases=biases)


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """A frozen quantized classifier (V, D) of PyTorch tensors, for a linear loss or a teacher. It gets no gradient.

    Matrix products dequantize a range of its classes at a time, so that it never exists as a whole in another dtype.
    `xent.integrations.torch.classifier` makes one of a head of bitsandbytes or torchao. A target's logit is rounded to
    the dtype of the product, like the other logits, except in log-probabilities.

    Parameters
    ----------
    packed : torch.Tensor
        The quantized weight, in any form. Only its device is used.
    shape : (int, int)
        V and D.
    rows : callable (start, stop, dtype) -> tensor (stop - start, D)
        Returns the rows of the classes [start, stop) in a torch.dtype.

    Examples
    --------
    >>> import torch, xent
    >>> packed, scale = torch.ones(100, 8, dtype=torch.int8), 0.5
    >>> head = xent.QuantizedRows(packed, (100, 8), lambda start, stop, dtype: packed[start:stop].to(dtype) * scale)
    >>> xent.linear_cross_entropy(torch.zeros(2, 8), head, torch.tensor([3, 7]))
    tensor(4.6052)
    """

    packed: Array
    shape: tuple[int, int]
    rows: Callable[[int, int, Any], Array]


@dataclass(frozen=True, eq=False)
class Support:
    """The classes that a sampler with top-k, top-p or min-p allowed for each row.

    `target` has N rows in row-major order. Row i has the classes ``ids[offsets[i]:offsets[i + 1]]``. Sums over the
    vocabulary are over these classes only.

    Parameters
    ----------
    ids : integer array (M,)
        Classes in [0, V), each at most once in a row, in any order.
    offsets : integer array (N + 1,)
        The start of each row in `ids`; the last entry is M.

    Examples
    --------
    >>> import numpy as np, xent
    >>> support = xent.Support(ids=np.array([0, 2, 1]), offsets=np.array([0, 2, 3]))
    >>> xent.log_probs(np.zeros((2, 3)), np.array([0, 1]), support=support).round(4)
    array([-0.6931,  0.    ])
    """

    ids: Array
    offsets: Array


@dataclass(frozen=True, eq=False)
class VocabParallel:
    """A vocabulary in shards: this rank of a process group holds the classes [first, first + rows) of `size`.

    Each rank passes its shard: logits (..., rows), or classifier (rows, D) and bias (rows,), and its part of class
    weights (rows,) and class probabilities (..., rows). All other arguments, hidden states and targets in particular,
    must be the same on every rank, bit for bit. Then so are loss and statistics. Every rank of the group must make the
    call. Rows that differ, and shards that overlap or leave a gap, raise ValueError; on accelerators, if `first` and
    `size` are passed, loss and gradient of these rows are NaN.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, or torch.distributed.DeviceMesh of one dimension
        The ranks, each of which holds one shard.
    first : int, optional
        The first class of the shard. By default shards follow each other in the order of ranks, as DTensor and
        torch.chunk split a vocabulary; the ranks then exchange their ranges in every call, and the host waits for it.
        Either all ranks pass it or none.
    size : int, optional
        V, the number of classes. Rows of a shard beyond V are padding: they have no probability and no gradient. By
        default no shard has padding. With `first` and `size` nothing is exchanged, and every rank must have the same
        number of rows; CUDA graphs need both.
    sequence_parallel : bool
        Whether the `input` of a linear loss holds only this rank's tokens, (..., T_r, D), split along that axis as
        torch.chunk splits T. Targets and sample weights are those of all T tokens. The call gathers the hidden states,
        and reduces and scatters their gradient.

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
class LinearTeacher:
    """A teacher given as hidden states and a classifier. Its logits are not stored, and it gets no gradient.

    Its logits are ``input @ weight.T + bias``, followed by its own scale and softcap, and by the temperature of the
    call. Its width D' may differ from the student's; its vocabulary may only in a `Subset`.

    Parameters
    ----------
    input : array (..., D'); float64, float32, bfloat16 or float16
        Hidden states, one for each row of the student.
    weight : array (V, D'), the dtype of input; or QuantizedWeight or QuantizedRows
        The teacher's classifier. For MLX and PyTorch it may be quantized.
    bias : array (V,), the dtype of input, optional
        Bias of the classifier.
    softcap : float > 0, optional
        Bound of the teacher's logits, as in `xent.cross_entropy`.
    logit_scale : float
        Factor of the teacher's logits.

    Examples
    --------
    >>> import numpy as np, xent
    >>> teacher = xent.LinearTeacher(np.eye(3), 2 * np.eye(3))
    >>> float(xent.divergence(np.zeros((3, 3)), teacher).round(4))
    0.433
    """

    input: Array
    weight: "Array | QuantizedWeight | QuantizedRows"
    bias: Array = None
    softcap: float | None = None
    logit_scale: float = 1.0


@dataclass(frozen=True, eq=False)
class TopKTeacher:
    """A teacher given as its K most probable classes per row, as stored predictions are. It gets no gradient.

    Let q_k = exp(log_probs_k) be the teacher's probabilities, p_k the student's, and t = 1 - sum_k q_k the teacher's
    mass on the other classes. ``tail`` selects how t is treated:

    - "bucket": all other classes form one bucket, so that both distributions have K + 1 cells. The divergence is at
      least 0, and 0 only if the student has the teacher's probabilities at the K classes.
    - "renormalize": q_k / sum_k q_k replaces q_k; all other classes have teacher probability 0.
    - "drop": sum_k q_k (log q_k - log p_k), without a term for t. This is not a divergence: it may be negative, and its
      minimum is not where student and teacher agree.

    Parameters
    ----------
    ids : integer array (..., K)
        Classes in [0, V), in any order, each at most once in a row.
    log_probs : float array (..., K)
        Their log-probabilities over the whole vocabulary, at the temperature of the call. To pad rows with fewer than K
        classes, use -inf; the id of such an entry is ignored.
    tail : {"bucket", "renormalize", "drop"}
        How the mass on the other classes is treated.

    Examples
    --------
    >>> import numpy as np, xent
    >>> teacher = xent.TopKTeacher(ids=np.array([[2, 0]]), log_probs=np.log([[0.7, 0.2]]))
    >>> float(xent.divergence(np.log([[0.2, 0.1, 0.7]]), teacher).round(4))
    0.0
    """

    ids: Array
    log_probs: Array
    tail: str = "bucket"


@dataclass(frozen=True, eq=False)
class Subset:
    """A teacher with a larger vocabulary, restricted to the student's classes: for a draft model with fewer classes.

    Class c of the student is class ``ids[c]`` of the teacher. The teacher's probabilities are renormalised over these
    classes, q_c = e^(t_ids[c]) / sum_k e^(t_ids[k]). Logits of other classes are not computed: each call gathers the
    rows ``ids`` of the classifier once (V' x D' elements).

    Parameters
    ----------
    teacher : LinearTeacher or array (..., V)
        The teacher with all V classes.
    ids : integer array (V',)
        The classes in [0, V) that the student has, in the student's order, each once.

    Examples
    --------
    >>> import numpy as np, xent
    >>> teacher = xent.LinearTeacher(np.eye(3), np.array([[2.0, 0, 0], [0, 9, 9], [0, 0, 2], [5, 5, 5]]))
    >>> float(xent.divergence(np.zeros((3, 2)), xent.Subset(teacher, np.array([2, 0]))).round(4))
    0.2185
    """

    teacher: "Array | LinearTeacher"
    ids: Array


Teacher = LinearTeacher | TopKTeacher | Subset | Array
"""What the student of a divergence is compared with; an array has logits."""


@dataclass(frozen=True, eq=False)
class Stats:
    """The statistics that a call returns beside its results. A field that was not requested is None.

    With reduction "none" lse, nll and entropy have gradients; the others have none. Those of a divergence have none.

    Rows are the positions of `target`. A row whose target is `ignore_index`, or that has no target because of `shift`,
    is not counted; its value is 0, or -1 for predictions and ranks. x are the logits after scale, softcap and
    temperature. With a support, sums over c are over the row's support.

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
        log sum_c p_c^2: the Renyi entropy of order 2, negated.
    mean_logit : array, target's (index) shape, the loss's dtype
        The mean of x_c over classes.
    z_loss : 0-d array, the loss's dtype; target's (index) shape with reduction "none"
        The z-loss term of the returned loss, with the same reduction.
    accuracy : 0-d array, the loss's dtype
        The share of counted rows, in [0, 1], whose prediction is the target (for class probabilities: the most probable
        class); 0 if no row is counted. From the log-probability functions: 1 or 0 per row, target's shape.
    count : 0-d array, int64 (int32 in MLX)
        The number of counted rows.
    rank : array, target's shape, int64 (int32 in MLX)
        The number of classes whose logit is larger than the target's: 0 where the target is the prediction or ties with
        it. NaN is the largest logit. Only of log-probabilities. -1 also where the target is no class.
    """

    lse: Array = None
    nll: Array = None
    entropy: Array = None
    predictions: Array = None
    log_sum_sq_probs: Array = None
    mean_logit: Array = None
    z_loss: Array = None
    accuracy: Array = None
    count: Array = None
    rank: Array = None


@dataclass(frozen=True)
class BackendInfo:
    """One line of `xent.backends()`: a backend and, if it is not available, the reason."""

    name: str
    framework: str
    available: bool
    reason: str | None
    versions: dict[str, str]
    devices: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Which fast paths are on or off and why, and a condition under which "auto" takes the backend."""
