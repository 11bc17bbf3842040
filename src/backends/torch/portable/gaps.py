"""The terms of divergences, of which none is negative.

With u = log o - log w, a divergence sum_c w (log w - log o) of distributions w and o is computed as the sum of ::

    w (e^u - 1 - u) = o - w - w u    >= 0

The sums are equal, because w and o each sum to 1. No term is negative, and an error of either log-sum-exp, which is
common to all u of a row, enters only squared. So close distributions lose no precision, and equal ones give exactly 0.
"""

from typing import Any

import torch
from torch import Tensor

from xent.core.call import Options

__all__ = ["gaps", "terms"]


def gaps(w: Tensor, o: Tensor, u: Tensor) -> Tensor:
    """Return w (e^u - 1 - u) for o = w e^u, computed as o - w - w u if e^u is large; o where w is 0."""
    near = u.clamp(max=1)
    gap = torch.where(u > 1, o - w - w * u, w * (torch.expm1(near) - near).clamp(min=0))
    return torch.where(w == 0, o, gap)


def terms(options: Options, p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor | None, Any]:
    """Return the terms of the divergence per class, and v and f: dl/dx_c = f p_c (sum_k p_k v_k - v_c).

    v is None where dl/dx_c is p_c - q_c.
    """
    beta = options.beta
    if options.kind == "tv":
        apart = p - q
        return apart.abs() / 2, apart.sign() / -2, 1
    if beta == 0:
        return gaps(q, p, log_p - log_q), None, 1
    apart = log_q - log_p
    if beta == 1:
        return gaps(p, q, apart), apart, 1
    # log m - log p = log((1 - beta) + beta e^apart), and similarly log m - log q; start from the larger of p and q.
    share = torch.where(apart > 0, apart.new_full((), 1 - beta), apart.new_full((), beta))
    common = torch.log1p(share * torch.expm1(-apart.abs()))
    from_p, from_q = common + apart.clamp(min=0), common - apart.clamp(max=0)
    m = (1 - beta) * p + beta * q
    return beta * gaps(q, m, from_q) + (1 - beta) * gaps(p, m, from_p), from_p, 1 - beta
