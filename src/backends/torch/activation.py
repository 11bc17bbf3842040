"""The activation x(z) of logits z, with scale and softcap, and its slope dx/dz.

Slopes are computed from tanh or from z, not from x: where |tanh| is near 1, the rounding of x = k tanh would add to the
error of a small difference.
"""

from typing import Any

from torch import Tensor

from xent.core.spec import LossSpec

__all__ = ["activate", "activate_with_slope", "slope"]


def activate(logits: Tensor, spec: LossSpec, bend: Tensor | None) -> Tensor:
    """Return x (R, ...), computed in place. `bend` (R, 2) contains scale and softcap of each row if they differ."""
    scale, cap = _bends(logits, spec, bend)
    if cap is None:
        return _scaled(logits, scale)
    return _scaled(logits, scale).div_(cap).tanh_().mul_(cap)


def activate_with_slope(logits: Tensor, spec: LossSpec, bend: Tensor | None) -> tuple[Tensor, Any]:
    """Return x, computed in place, and dx/dz = s (1 - tanh(s z / k)^2), a tensor like x; s without softcap.

    Its rounding error is that of `xent.backends.torch.plain`; unlike `slope` it takes no exponential besides tanh.
    """
    scale, cap = _bends(logits, spec, bend)
    if cap is None:
        return _scaled(logits, scale), scale
    tanh = _scaled(logits, scale).div_(cap).tanh_()
    slopes = tanh.square().neg_().add_(1)
    return tanh.mul_(cap), _scaled(slopes, scale)


def slope(logits: Tensor, spec: LossSpec, bend: Tensor | None) -> Any:
    """Return dx/dz = 4 s t / (1 + t)^2 with t = e^(-2 |s z / k|), without cancellation; s without softcap."""
    scale, cap = _bends(logits, spec, bend)
    if cap is None:
        return scale
    t = (logits * scale).div_(cap).abs_().mul_(-2).exp_()
    return 4 * scale * t / (1 + t).square()


def _scaled(values: Tensor, scale: Any) -> Tensor:
    """Return values times the scale, in place."""
    return values.mul_(scale) if isinstance(scale, Tensor) or scale != 1 else values


def _bends(like: Tensor, spec: LossSpec, bend: Tensor | None) -> tuple[Any, Any]:
    if bend is None:
        return spec.logit_scale, spec.softcap
    scale, cap = (one.view(-1, *[1] * (like.dim() - 1)) for one in bend.unbind(1))
    return scale, None if spec.softcap is None else cap
