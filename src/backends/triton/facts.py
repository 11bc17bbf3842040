"""What is known of the rows of one call before their logits are, in the form in which kernels take it.

Kernels find what is known of a row (target, weight, factor of the gradient) in the caller's own tensors, each for
itself; only the divisor of a mean takes a launch beforehand.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.facts import check_targets, divisor_of
from xent.backends.torch.job import Upstream
from xent.backends.torch.options import Options
from xent.backends.triton.facts_kernels import divisor_kernel
from xent.backends.triton.launch import launch, next_power_of_2

__all__ = ["Facts"]

_MANY = 1024
_LARGEST_SOFTCAP = 256


class Facts:
    """The options of N rows."""

    def __init__(self, options: Options, vocabulary: int, shift: int, upstream: Upstream | None, narrow: bool) -> None:
        self.spec = spec = options.spec
        self.vocabulary, self.shift = vocabulary, shift
        target = options.target
        self.device = target.device
        self.probabilities = target if target.is_floating_point() else None
        if self.probabilities is None:
            check_targets(options, vocabulary, shift)
        shape = target.shape if self.probabilities is None else target.shape[:-1]
        self.count = shape.numel()
        self.length = shape[-1] if shape else 1
        self.target = target.contiguous() if self.probabilities is None else None
        weight = options.sample_weight
        self.sample_weight = None if weight is None else weight.contiguous()
        self.class_weight = None if options.weight is None else options.weight.float().contiguous()
        self.total_weight = None if self.class_weight is None else self.class_weight.sum()
        self.upstream = None if upstream is None or upstream.loss is None else upstream.loss.reshape(-1)
        self.mean = spec.reduction == "mean" or narrow
        names = spec.stats
        self.all_rows = bool(names)
        """Whether rows without a gradient are due for their statistics."""
        self.counted = self._empty((), torch.int64) if "count" in names or "accuracy" in names else None
        needed = spec.reduction != "none" or narrow or self.counted is not None
        self.scratch = self._divided(divisor_of(options), narrow) if needed else None
        """(4,): D, 1 / D, what a narrow gradient lacks, and how many programs are done."""

    def _empty(self, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    @property
    def rows(self) -> tuple[int, ...]:
        """What kernels are told of the rows."""
        return self.count, self.length, self.shift, self.spec.ignore_index, self.vocabulary

    @property
    def numbers(self) -> tuple[float, ...]:
        """What kernels are told of the loss and of the logits' scale."""
        spec = self.spec
        smoothing = spec.label_smoothing
        return 1 - smoothing, smoothing / self.vocabulary, spec.z_loss, spec.softcap or 0.0, spec.logit_scale

    @property
    def bent(self) -> dict[str, bool]:
        """What is done to logits."""
        return {"CAPPED": self.spec.softcap is not None, "SCALED": self.spec.logit_scale != 1}

    @property
    def loss_upstream(self) -> tuple[Tensor | None, int]:
        """The upstream gradient of each row's loss and its stride, 0 where there is one for all."""
        upstream = self.upstream
        return upstream, 0 if upstream is None or upstream.numel() == 1 else upstream.stride(0)

    def is_quick(self, half: bool) -> bool:
        """Whether the softcap may be off by its 10^7th part: among many classes, and where it bends."""
        cap = self.spec.softcap
        return half and self.vocabulary >= _MANY and (cap is None or cap <= _LARGEST_SOFTCAP)

    def _divided(self, divisor: tuple[float | None, Tensor | None], narrow: bool) -> Tensor:
        """Return what is found of all rows."""
        scratch = self._empty(4)
        number, normalizer = divisor
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
                self.counted,
                0.0 if number is None else float(number),
                *self.rows,
            ),
            {
                "SHIFTED": self.shift > 0,
                "MEAN": mean,
                "NUMBER": mean and number is not None,
                "NARROW": narrow,
                "PROBABILITIES": self.probabilities is not None,
                "BLOCK": min(next_power_of_2(max(self.count, 16)), 4096),
            },
            num_warps=4 if self.count <= 1024 else 16,
        )
        return scratch
