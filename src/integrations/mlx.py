"""Modules for MLX: both losses as mlx.nn modules, and a function that returns the arrays of a model's classifier.

Options are passed to the constructor; sample_weight and normalizer, which change per batch, are passed to each call.
"""

from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from xent.api import cross_entropy, linear_cross_entropy
from xent.core.spec import QuantizedWeight, Scalar
from xent.core.validate import check_options

__all__ = ["FUSE_FIRST", "CrossEntropyLoss", "LinearCrossEntropyLoss", "classifier", "is_adapted"]

FUSE_FIRST = "LoRA's part is not in its weight: fuse it first, with module.fuse(), or leave the head out of LoRA"

_DENSE = (nn.Linear, nn.Embedding)
_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


def classifier(module: nn.Module) -> tuple[mx.array | QuantizedWeight, mx.array | None]:
    """Return the weight and bias of a classifier, to be passed to `xent.linear_cross_entropy`.

    Frozen arrays are passed through ``mx.stop_gradient``, so that their gradient is not computed. This is needed
    because ``nn.value_and_grad`` does not tell the loss function which parameters of the model are frozen.

    Parameters
    ----------
    module : mlx.nn.Linear, Embedding, QuantizedLinear or QuantizedEmbedding
        The classifier; an embedding if the head is tied to it.

    Returns
    -------
    linear_weight : array (V, D), or QuantizedWeight
    linear_bias : array (V,), or None

    Raises
    ------
    TypeError
        The module has another type. Call `fuse()` on a layer that LoRA wraps.

    Examples
    --------
    >>> import mlx.core as mx, mlx.nn as nn, xent
    >>> from xent.integrations.mlx import classifier
    >>> head = nn.Linear(64, 1000, bias=False).to_quantized(group_size=64, bits=4)
    >>> weight, bias = classifier(head)
    >>> weight.shape, bias
    ((1000, 64), None)
    >>> xent.linear_cross_entropy(mx.zeros((2, 64)), weight, mx.array([3, 7]), linear_bias=bias)
    array(6.90776, dtype=float32)
    """
    if isinstance(module, _QUANTIZED):
        weight = QuantizedWeight(
            module["weight"], module["scales"], module.get("biases"), module.group_size, module.bits, module.mode
        )
        return weight, _held(module, "bias")
    if isinstance(module, _DENSE):
        return _held(module, "weight"), _held(module, "bias")
    known = ", ".join(kind.__name__ for kind in (*_DENSE, *_QUANTIZED))
    hint = f": {FUSE_FIRST}" if is_adapted(module) else ""
    raise TypeError(f"module must be one of mlx.nn's {known}, got {type(module).__name__}{hint}")


def is_adapted(module: nn.Module) -> bool:
    """Whether mlx-lm's LoRA or DoRA wraps this layer."""
    return isinstance(module, nn.Module) and "lora_a" in module


def _held(module: nn.Module, name: str) -> Any:
    value = module.get(name)
    return value if value is None or name in module.trainable_parameters() else mx.stop_gradient(value)


class CrossEntropyLoss(nn.Module):  # type: ignore[misc]
    """`xent.cross_entropy` as a module without parameters.

    Parameters
    ----------
    weight : array (V,), optional
        Weight of each class. It is not a parameter: it is not trained and not saved.
    ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, axis, stats, backend
        As in `xent.cross_entropy`.

    Examples
    --------
    >>> import mlx.core as mx
    >>> from xent.integrations.mlx import CrossEntropyLoss
    >>> loss = CrossEntropyLoss(label_smoothing=0.1, z_loss=1e-4)
    >>> loss(mx.zeros((2, 4)), mx.array([0, 3]))
    array(1.38649, dtype=float32)
    """

    def __init__(
        self,
        weight: mx.array | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        axis: int = -1,
        stats: Collection[str] = (),
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self._options = _Options(
            weight,
            backend,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            stats=stats,
        )
        self.axis = axis

    def __call__(
        self, logits: mx.array, target: mx.array, *, sample_weight: mx.array | None = None, normalizer: Scalar = None
    ) -> Any:
        """Return the loss, or (loss, Stats) if the constructor got `stats`."""
        return cross_entropy(
            logits, target, **self._options.named, sample_weight=sample_weight, normalizer=normalizer, axis=self.axis
        )

    def _extra_repr(self) -> str:
        return f"{self._options}, axis={self.axis}"


class LinearCrossEntropyLoss(nn.Module):  # type: ignore[misc]
    """`xent.linear_cross_entropy` as a module that owns its classifier, the mlx.nn.Linear `linear`.

    ``mlx.nn.quantize`` replaces the classifier by a frozen quantized one.

    Parameters
    ----------
    input_dims, output_dims : int
        D and V.
    bias : bool
        Whether the classifier has a bias.
    weight, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, stats, backend
        As in `CrossEntropyLoss`.
    shift, head_weight, workspace
        As in `xent.linear_cross_entropy`.

    Examples
    --------
    >>> import mlx.core as mx
    >>> from xent.integrations.mlx import LinearCrossEntropyLoss
    >>> loss = LinearCrossEntropyLoss(8, 100, shift=1)
    >>> loss(mx.zeros((2, 5, 8)), mx.zeros((2, 5), mx.int32))
    array(4.60517, dtype=float32)
    """

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        *,
        bias: bool = False,
        weight: mx.array | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        shift: int | Sequence[int] = 0,
        head_weight: Sequence[float] | None = None,
        workspace: int | None = None,
        stats: Collection[str] = (),
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if weight is not None and tuple(weight.shape) != (output_dims,):
            raise ValueError(f"weight must have shape ({output_dims},), one per class; got {tuple(weight.shape)}")
        self.linear = nn.Linear(input_dims, output_dims, bias=bias)
        self._options = _Options(
            weight,
            backend,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            stats=stats,
            shift=shift,
            head_weight=head_weight,
            workspace=workspace,
        )

    def __call__(
        self, input: mx.array, target: mx.array, *, sample_weight: mx.array | None = None, normalizer: Scalar = None
    ) -> Any:
        """Return the loss of hidden states, or (loss, Stats) if the constructor got `stats`."""
        linear_weight, linear_bias = classifier(self.linear)
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            **self._options.named,
            sample_weight=sample_weight,
            normalizer=normalizer,
        )

    def _extra_repr(self) -> str:
        return str(self._options)


class _Options:
    """The options of both modules, in a separate object, because MLX treats a module's own arrays as parameters."""

    def __init__(self, weight: mx.array | None, backend: str, **named: Any) -> None:
        """Validate the options, so that the module's constructor raises errors and not the first batch."""
        check_options("mlx", named, arrays=True)
        self.named = named | {"weight": weight, "backend": backend}

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.named.items() if name != "weight")
