"""The activation x(z) of logits z, with scale and softcap, and its slope dx/dz."""

from typing import Any

from torch import Tensor

from xent.core.spec import LossSpec

__all__ = ["activate", "slope"]


def activate(logits: Tensor, spec: LossSpec, bend: Tensor | None) -> Tensor:
    """Return x (R, ...), computed in place. `bend` (R, 2) contains scale and softcap of each row if they differ."""
    scale, cap = _bends(logits, spec, bend)
    if bend is not None or scale != 1:
        logits.mul_(scale)
    if cap is not None:
        logits.div_(cap).tanh_().mul_(cap)
    return logits


def slope(x: Tensor, spec: LossSpec, bend: Tensor | None) -> Any:
    """Return dx/dz, a tensor like x or a number."""
    scale, cap = _bends(x, spec, bend)
    return scale if cap is None else (1 - (x / cap).square()).mul_(scale)


def _bends(like: Tensor, spec: LossSpec, bend: Tensor | None) -> tuple[Any, Any]:
    if bend is None:
        return spec.logit_scale, spec.softcap
    scale, cap = (one.view(-1, *[1] * (like.dim() - 1)) for one in bend.unbind(1))
    return scale, None if spec.softcap is None else cap
