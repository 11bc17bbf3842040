"""The options of a call in the form for a row kernel: the terms of the loss, and one array of numbers.

An option may be a 0-d array instead of a Python number. A compiled function then uses the value at each call, while a
new Python number would cause it to be traced again.
"""

from typing import Any

import mlx.core as mx

from xent.backends.mlx.kernels import Terms
from xent.core.spec import LARGEST, LossSpec

__all__ = ["numbers_of", "scalar", "softcap_of", "terms_of"]


def terms_of(spec: LossSpec, bent: bool) -> Terms:
    """Return the terms of the loss. A term whose number is in an array is included for every value.

    `bent`: whether each row has its own scale.
    """
    return Terms(
        smoothing=_differs(spec.label_smoothing, 0),
        z_loss=_differs(spec.z_loss, 0),
        softcap=spec.softcap is not None,
        scale=bent or _differs(spec.logit_scale, 1),
    )


def numbers_of(spec: LossSpec, vocabulary: int, class_weight: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """Return `xent.backends.mlx.kernels.RowFacts.numbers`, (8,)."""
    total: Any = vocabulary if class_weight is None else class_weight.sum()
    given: list[Any] = [spec.label_smoothing, spec.z_loss, softcap_of(spec, dtype), spec.logit_scale]
    if not any(isinstance(value, mx.array) for value in (*given, total)):
        return mx.array([*given, given[0] / vocabulary, total, 0.0, 0.0], dtype=dtype)
    smoothing, *others = (scalar(value, dtype) for value in given)
    rest = [smoothing / vocabulary, scalar(total, dtype), mx.zeros((), dtype), mx.zeros((), dtype)]
    return mx.stack([smoothing, *others, *rest])


def softcap_of(spec: LossSpec, dtype: mx.Dtype) -> Any:
    """Return the softcap as a number or array, bounded by `LARGEST`; 0 for none."""
    cap: Any = 0.0 if spec.softcap is None else spec.softcap
    return mx.minimum(cap.astype(dtype), LARGEST) if isinstance(cap, mx.array) else cap


def scalar(value: Any, dtype: mx.Dtype) -> mx.array:
    """Return a number or a 0-d array as a 0-d array of `dtype`."""
    return value.astype(dtype) if isinstance(value, mx.array) else mx.array(float(value), dtype=dtype)


def _differs(value: Any, neutral: float) -> bool:
    return isinstance(value, mx.array) or value != neutral
