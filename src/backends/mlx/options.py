"""The options of a call in the form for a row kernel: the terms of the loss, and one array of numbers.

An option may be a 0-d array instead of a Python number. A compiled function then uses the value at each call, while a
new Python number would cause it to be traced again.
"""

from typing import Any

import mlx.core as mx

from xent.backends.mlx.kernels import Terms
from xent.backends.mlx.prepare import scalar
from xent.core.call import Activation, Call
from xent.core.spec import LARGEST

__all__ = ["numbers_of", "softcap_of", "terms_of"]


def terms_of(call: Call) -> Terms:
    """Return the terms of the loss. A term whose number is in an array is included for every value."""
    activation, options = call.activation, call.options
    return Terms(
        smoothing=_differs(options.label_smoothing, 0),
        z_loss=_differs(options.z_loss, 0),
        softcap=activation.softcap is not None,
        scale=activation.temperature is not None or _differs(activation.logit_scale, 1),
    )


def numbers_of(call: Call, vocabulary: int, class_weight: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """Return `xent.backends.mlx.kernels.RowFacts.numbers`, (8,)."""
    total: Any = vocabulary if class_weight is None else class_weight.sum()
    activation, options = call.activation, call.options
    given: list[Any] = [options.label_smoothing, options.z_loss, softcap_of(activation), activation.logit_scale]
    if not any(isinstance(value, mx.array) for value in (*given, total)):
        return mx.array([*given, given[0] / vocabulary, total, 0.0, 0.0], dtype=dtype)
    smoothing, *others = (scalar(value, dtype) for value in given)
    rest = [smoothing / vocabulary, scalar(total, dtype), mx.zeros((), dtype), mx.zeros((), dtype)]
    return mx.stack([smoothing, *others, *rest])


def softcap_of(activation: Activation) -> Any:
    """Return the softcap as a number or array, bounded by `LARGEST`; 0 for none."""
    cap: Any = 0.0 if activation.softcap is None else activation.softcap
    return mx.minimum(cap, LARGEST) if isinstance(cap, mx.array) else cap


def _differs(value: Any, neutral: float) -> bool:
    return isinstance(value, mx.array) or value != neutral
