"""The inputs of the rows of one call other than logits, in the form of kernel arguments.

Each kernel reads a row's target, weight and upstream gradient from the caller's own tensors. The divisor of a mean
and the number of rows with a target need a launch beforehand.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.facts import bend_of, check_targets, divisor_of
from xent.backends.torch.job import Upstream
from xent.backends.torch.options import Options
from xent.backends.triton.facts_kernels import divisor_kernel
from xent.backends.triton.launch import launch, next_power_of_2
from xent.core.spec import LossSpec

__all__ = ["Facts", "bends", "is_quick", "scales", "strided"]

_MANY = 1024
_FEW = 256
_LARGEST_SOFTCAP = 256


class Facts:
    """Target, weights, options and upstream gradients of N rows."""

    def __init__(self, options: Options, vocabulary: int, shift: int, upstream: Upstream | None, narrow: bool) -> None:
        self.spec = spec = options.spec
        self.vocabulary, self.shift = vocabulary, shift
        target = options.target
        self.device = target.device
        self.probabilities = target if target.is_floating_point() else None
        if self.probabilities is None:
            check_targets(options, vocabulary, shift, first=upstream is None)
        shape = target.shape if self.probabilities is None else target.shape[:-1]
        self.count = shape.numel()
        self.length = shape[-1] if shape else 1
        self.target = target.contiguous() if self.probabilities is None else None
        weight = options.sample_weight
        self.sample_weight = None if weight is None else weight.contiguous()
        self.class_weight = None if options.weight is None else options.weight.float().contiguous()
        self.total_weight = None if self.class_weight is None else self.class_weight.sum()
        self.bend = bend_of(options)
        """(N, 2): logit scale and softcap of each position of the target; None if one number is used for all."""
        self.support = self._support(options)
        """(ids, offsets) of the support of each position of the target; None for all classes."""
        self.upstream = Upstream() if upstream is None else upstream
        self.statistics = self.upstream[1:] != (None, None, None)
        """Whether there are upstream gradients of statistics, which also apply to rows with weight 0."""
        self.mean = spec.reduction == "mean" or narrow
        names = spec.stats
        self.all_rows = bool(names) or self.statistics
        """Whether rows with weight 0 must be computed, for their statistics or for gradients of these."""
        self._counted = self._empty((), torch.int64) if "count" in names or "accuracy" in names else None
        self._divisor, self._narrow = divisor_of(options), narrow
        self._scratch: Tensor | None = None

    def _empty(self, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    @property
    def scratch(self) -> Tensor | None:
        """(3,) float32: D, 1 / D, and the remaining factor of narrow gradients; None if nothing needs them."""
        if self._scratch is None and (self.mean or self._counted is not None):
            self._scratch = self._divided()
        return self._scratch

    @property
    def counted(self) -> Tensor | None:
        """() int64: the number of rows with a target; None if no statistic needs it."""
        if self._counted is not None and self._scratch is None:
            self._scratch = self._divided()
        return self._counted

    def divides_few(self) -> int:
        """Return FEW for the next launch, whose kernel fills `scratch` if FEW > 0: it then computes the divisor itself.

        For few rows that takes the GPU less time than a launch takes the host. Not for weighted rows: the order in
        which their weights are added, and so the last bit of the divisor, would depend on the kernel.
        """
        weights = (self.sample_weight, self.class_weight)
        given = (self._scratch, self._counted, self.probabilities, *self._divisor, *weights)
        if self.count > _FEW or not self.mean or any(one is not None for one in given):
            return 0
        self._scratch = self._empty(3)
        return max(next_power_of_2(self.count), 16)

    @property
    def rows(self) -> tuple[int, ...]:
        """The kernel arguments that describe the rows."""
        return self.count, self.length, self.shift, self.spec.ignore_index, self.vocabulary

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The kernel arguments that describe the loss and the scale of the logits."""
        spec = self.spec
        smoothing = spec.label_smoothing
        return 1 - smoothing, smoothing / self.vocabulary, spec.z_loss, *self.scales

    @property
    def scales(self) -> tuple[Any, ...]:
        """The kernel arguments for the scale of logits: softcap, logit scale, and those per row with their stride."""
        return scales(self.spec, self.bend)

    @property
    def constants(self) -> dict[str, bool]:
        """The kernels' constants for the shift of the target and the scale of the logits."""
        return {"SHIFTED": self.shift > 0, **bends(self.spec, self.bend)}

    @property
    def upstreams(self) -> tuple[Tensor | int | None, ...]:
        """The upstream gradients of each row's loss, lse, nll and entropy, each with its stride."""
        each = (None if given is None else given.reshape(-1) for given in self.upstream)
        return tuple(value for given in each for value in strided(given))

    def _support(self, options: Options) -> tuple[Tensor, Tensor] | None:
        if options.support_ids is None or options.support_offsets is None:
            return None
        return options.support_ids.contiguous(), options.support_offsets.contiguous()

    def _divided(self) -> Tensor:
        """Compute and return `scratch`; fill `counted` if it is needed."""
        scratch = self._empty(3)
        number, normalizer = self._divisor
        mean = self.spec.reduction == "mean"
        launch(
            divisor_kernel,
            1,
            (
                self.target,
                self.sample_weight,
                self.class_weight,
                normalizer if mean else None,
                scratch,
                self._counted,
                0.0 if number is None else float(number),
                *self.rows,
            ),
            {
                "SHIFTED": self.shift > 0,
                "MEAN": mean,
                "NUMBER": mean and number is not None,
                "NARROW": self._narrow,
                "PROBABILITIES": self.probabilities is not None,
                "BLOCK": min(next_power_of_2(max(self.count, 16)), 4096),
            },
            num_warps=4 if self.count <= 1024 else 16,
        )
        return scratch


def scales(spec: LossSpec, bend: Tensor | None) -> tuple[Any, ...]:
    """Return the kernel arguments for the scale of logits: softcap, logit scale, and both per row with their stride."""
    return spec.softcap or 0.0, spec.logit_scale, *strided(bend)


def bends(spec: LossSpec, bend: Tensor | None) -> dict[str, bool]:
    """Return the kernels' constants for the scale of the logits."""
    return {"CAPPED": spec.softcap is not None, "SCALED": spec.logit_scale != 1 or bend is not None}


def is_quick(spec: LossSpec, bend: Tensor | None, vocabulary: int, half: bool) -> bool:
    """Return whether capped logits may have an error of softcap / (3 * 10^6), which is faster to compute.

    It may if logits are 16-bit and there are many classes, unless the softcap is large or differs by row.
    """
    cap = spec.softcap
    return half and vocabulary >= _MANY and (cap is None or (bend is None and cap <= _LARGEST_SOFTCAP))


def strided(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    """Return a tensor and the stride of its rows, which is 0 for None or a single row."""
    return tensor, 0 if tensor is None or len(tensor) == 1 else tensor.stride(0)
