"""Drop-in modules for PyTorch: torch.nn's two losses with the same names, constructors and state_dict.

Options that torch.nn's modules do not have are keyword arguments: z_loss, softcap, logit_scale, stats and backend of
the constructor; sample_weight and normalizer, which change per batch, of each call.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xent.api import cross_entropy, linear_cross_entropy
from xent.backends.torch.quantized import classifier
from xent.core.spec import Scalar
from xent.core.validate import check_options

__all__ = ["CrossEntropyLoss", "LinearCrossEntropyLoss", "classifier"]


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss computed by `xent.cross_entropy`.

    Parameters
    ----------
    weight, size_average, ignore_index, reduce, reduction, label_smoothing
        As in torch.nn.CrossEntropyLoss, including the deprecated arguments.
    z_loss, softcap, logit_scale, inplace, stats, backend
        As in `xent.cross_entropy`.
    axis : int, optional
        The axis of the classes. None means PyTorch's layout: axis 1, or axis 0 of one-dimensional logits. Pass -1 for
        the (batch, sequence, vocabulary) logits of a language model.

    Examples
    --------
    >>> import torch
    >>> from xent.integrations.torch import CrossEntropyLoss
    >>> loss = CrossEntropyLoss(label_smoothing=0.1, z_loss=1e-4)
    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> loss(logits, torch.tensor([0, 3])).backward()
    >>> logits.grad[0]
    tensor([-0.3375,  0.1125,  0.1125,  0.1125])
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        axis: int | None = None,
        inplace: bool = False,
        stats: Collection[str] = (),
        backend: str = "auto",
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss, self.softcap, self.logit_scale = z_loss, softcap, logit_scale
        self.axis, self.inplace, self.stats, self.backend = axis, inplace, stats, backend
        _check(self)

    def forward(
        self, input: Tensor, target: Tensor, *, sample_weight: Tensor | None = None, normalizer: Scalar = None
    ) -> Any:
        """Return the loss of logits `input`, or (loss, Stats) if the constructor got `stats`."""
        torch_axis = 1 if input.dim() > 1 else 0
        return cross_entropy(
            input,
            target,
            **_options(self),
            sample_weight=sample_weight,
            normalizer=normalizer,
            axis=torch_axis if self.axis is None else self.axis,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        """Return the options, for printing the module."""
        return f"{_describe(self)}, axis={self.axis}, inplace={self.inplace}"


class LinearCrossEntropyLoss(nn.Module):
    """torch.nn.LinearCrossEntropyLoss, a module that owns its classifier, computed by `xent.linear_cross_entropy`.

    Input is (..., in_features), target (...) or, for class probabilities, (..., num_classes). The classifier is
    ``self.linear``, a torch.nn.Linear, so that state_dict has the keys linear.weight and linear.bias.

    Parameters
    ----------
    in_features, num_classes, bias, device, dtype, reduction, weight, ignore_index, label_smoothing
        As in torch.nn.LinearCrossEntropyLoss (PyTorch 2.13).
    out_features : empty tuple
        Several output dimensions, each with its own classifier, are not supported: ValueError.
    z_loss, softcap, logit_scale, shift, head_weight, workspace, stats, backend
        As in `xent.linear_cross_entropy`. `workspace` replaces PyTorch's chunking `options`.

    Examples
    --------
    >>> import torch
    >>> from xent.integrations.torch import LinearCrossEntropyLoss
    >>> loss = LinearCrossEntropyLoss(8, 100, shift=1)
    >>> loss(torch.zeros(2, 5, 8), torch.zeros(2, 5, dtype=torch.int64))
    tensor(4.6052, grad_fn=<...>)
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
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
        if out_features:
            raise ValueError(f"out_features must be (): one classifier for all rows; got {out_features!r}")
        if weight is not None and tuple(weight.shape) != (num_classes,):
            raise ValueError(f"weight must have shape ({num_classes},), one per class; got {tuple(weight.shape)}")
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.weight: Tensor | None
        self.register_buffer("weight", weight)
        self.reduction, self.label_smoothing = reduction, label_smoothing
        self.ignore_index = -100 if ignore_index is None else ignore_index
        self.z_loss, self.softcap, self.logit_scale = z_loss, softcap, logit_scale
        self.workspace, self.stats, self.backend = workspace, stats, backend
        self.shift, self.head_weight = shift, head_weight
        _check(self, shift=shift, head_weight=head_weight, workspace=workspace)

    def forward(
        self, input: Tensor, target: Tensor, *, sample_weight: Tensor | None = None, normalizer: Scalar = None
    ) -> Any:
        """Return the loss of hidden states `input`, or (loss, Stats) if the constructor got `stats`."""
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            **_options(self),
            sample_weight=sample_weight,
            normalizer=normalizer,
            shift=self.shift,
            head_weight=self.head_weight,
            workspace=self.workspace,
        )

    def extra_repr(self) -> str:
        """Return the options, for printing the module."""
        own = f"shift={self.shift}, head_weight={self.head_weight}, workspace={self.workspace}"
        return f"{_describe(self)}, {own}"


def _options(module: nn.Module) -> dict[str, Any]:
    names = "weight ignore_index reduction label_smoothing z_loss softcap logit_scale stats backend"
    return {name: getattr(module, name) for name in names.split()}


def _check(module: nn.Module, **others: Any) -> None:
    """Raise for wrong options now rather than at the first batch."""
    check_options("torch", _options(module) | others, arrays=True)


def _describe(module: nn.Module) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in _options(module).items() if name != "weight")
