"""The activation x = softcap * tanh(logit_scale * z / softcap) / temperature of logits z, and its slope.

Slopes are 1 - tanh^2; the constant factor logit_scale / temperature of dx/dz is part of the coefficients of a row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xent.core.call import Activation

__all__ = ["activate", "factor", "identity", "sign", "slope"]

_IDENTITY = Activation()


def identity(activation: Activation) -> bool:
    """Return whether x is known to equal z."""
    return not any(isinstance(one, Tensor) for one in activation) and activation == _IDENTITY


def activate(x: Tensor, activation: Activation, room: Callable[[], Tensor] | None = None) -> Tensor | None:
    """Replace logits by x, in place. With `room` for it, return 1 - tanh^2, or None without a softcap.

    A temperature has the shape of `x`, or 1 in the place of the classes.
    """
    scale, cap, temperature = activation
    if isinstance(scale, Tensor) or scale != 1:
        x.mul_(scale)
    made = None
    if cap is not None:
        x.div_(cap).tanh_()
        made = None if room is None else torch.mul(x, x, out=room()).neg_().add_(1)
        x.mul_(cap)
    if temperature is not None:
        x.div_(temperature)
    return made


def slope(logits: Tensor, activation: Activation) -> Tensor | None:
    """Return 1 - tanh^2 = 4 t / (1 + t)^2 with t = e^(-2 |s z / k|), without cancellation; None without a softcap.

    A slope from tanh or x would be mostly rounding error where |tanh| is near 1.
    """
    scale, cap, _ = activation
    if cap is None:
        return None
    t = (logits * scale).div_(cap).abs_().mul_(-2).exp_()
    found: Tensor = 4 * t / (1 + t).square()
    return found


def factor(activation: Activation) -> Any:
    """Return logit_scale / temperature, a number or a tensor."""
    scale, _, temperature = activation
    return scale if temperature is None else scale / temperature


def sign(activation: Activation) -> Any:
    """Return the sign of the scale, a number or a 0-d tensor: x is in the order of sign * z."""
    scale = activation.logit_scale
    return scale.sign() if isinstance(scale, Tensor) else (scale > 0) - (scale < 0)
