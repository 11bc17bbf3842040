"""One call, described once: frozen facts that validation produces and every backend reads. No framework in here."""

from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "REDUCTIONS",
    "STAT_NAMES",
    "BackendInfo",
    "LinearCall",
    "LogitsCall",
    "LossSpec",
    "QuantizedWeight",
    "Stats",
]

REDUCTIONS = ("mean", "sum", "none")
STAT_NAMES = ("lse", "nll", "entropy", "predictions", "z_loss", "accuracy", "count")


@dataclass(frozen=True, eq=False)
class LossSpec:
    """The options that both functions share. `stats` keeps the order of `STAT_NAMES`."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    stats: tuple[str, ...] = ()

    def without_stats(self) -> "LossSpec":
        """Return the same without statistics."""
        return replace(self, stats=()) if self.stats else self


@dataclass(frozen=True, eq=False)
class LogitsCall:
    """A validated call of `xent.cross_entropy`. `normalizer` is a float, a 0-d array or None."""

    logits: Any
    target: Any
    weight: Any
    sample_weight: Any
    normalizer: Any
    loss: LossSpec
    axis: int
    inplace: bool


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A classifier (V, D) as `mlx.core.quantize` packs it, for `xent.linear_cross_entropy`. It gets no gradient.

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
    """A validated call of `xent.linear_cross_entropy`. `workspace` is in bytes."""

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


@dataclass(frozen=True, eq=False)
class Stats:
    """What the call was asked to report beside the loss; a field that was not asked for is None.

    No gradient, but for lse, nll and entropy with reduction "none" and MLX arrays.

    Rows are the positions of `target`; a row whose target is `ignore_index` (or that `shift` leaves without a target)
    is not counted and holds 0, or -1 for predictions. x are the logits after scale and softcap.

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
    z_loss : 0-d array, the loss's dtype; target's (index) shape with reduction "none"
        The share of the returned loss that the z term makes, reduced as the loss is.
    accuracy : 0-d array, the loss's dtype
        The share of counted rows whose prediction is the target (the most probable class, for class probabilities),
        in [0, 1]; 0 when no row counts.
    count : 0-d array, int64 (int32 in MLX)
        How many rows count.
    """

    lse: Any = None
    nll: Any = None
    entropy: Any = None
    predictions: Any = None
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
