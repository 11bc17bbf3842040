"""The steps of a divergence's rows in PyTorch's own operations, for every device, in blocks that fit into CPU caches.

With u = log o - log w, a divergence sum_c w (log w - log o) of distributions w and o is computed as the sum of ::

    w (e^u - 1 - u) = o - w - w u    >= 0

The sums are equal, because w and o each sum to 1. No term is negative, and an error of either log-sum-exp, which is
common to all u of a row, enters only squared. So close distributions lose no precision, and equal ones give exactly 0.
"""

import torch
from torch import Tensor

from xent.backends.torch.divergence.call import Divergence
from xent.backends.torch.divergence.facts import RowFacts, TopK
from xent.core.chunks import rows_per_block

__all__ = ["plain_rows"]

_PASSES = 6  # arrays of a block's size that exist at one time


def plain_rows(
    call: Divergence,
    z: Tensor,
    teacher: Tensor | TopK,
    facts: RowFacts,
    loss: Tensor,
    grad: Tensor | None,
    entropy: Tensor | None,
) -> None:
    """See `xent.backends.torch.divergence.steps.Steps`."""
    count, vocabulary = z.shape
    step = rows_per_block(vocabulary, loss.itemsize * _PASSES, z.device.type, torch.get_num_threads())
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        known = teacher[rows] if isinstance(teacher, Tensor) else teacher.of(rows)
        some = facts.of(rows)
        if entropy is not None:
            entropy[rows] = _entropy(call, z[rows], some.idle, loss.dtype)
        _block(call, z[rows], known, some, loss[rows], None if grad is None else grad[rows])


def _block(
    call: Divergence, z: Tensor, teacher: Tensor | TopK, facts: RowFacts, loss: Tensor, grad: Tensor | None
) -> None:
    acc, dead = loss.dtype, facts.dead
    x, slope = _activated(z.to(acc), call.softcap, call.logit_scale, grad is not None)
    if isinstance(teacher, TopK):
        found, derivative = _from_top_k(call.tail, x, teacher, grad is not None)
    else:
        t, _ = _activated(teacher.to(acc), call.teacher_softcap, call.teacher_scale, False)
        found, derivative = _between(call.beta, x, t, grad is not None)
    found = found * facts.weight
    loss.copy_(found if dead is None else found.masked_fill(dead, 0))
    if grad is None or derivative is None:
        return
    derivative *= facts.scale[:, None] * call.logit_scale
    if slope is not None:
        derivative *= slope
    if dead is not None:
        derivative.masked_fill_(dead[:, None], 0)
    grad.copy_(derivative)


def _entropy(call: Divergence, z: Tensor, idle: Tensor | None, acc: torch.dtype) -> Tensor:
    """Return the student's entropy (R,), before the gradient overwrites the logits."""
    log_p = torch.log_softmax(_activated(z.to(acc), call.softcap, call.logit_scale, False)[0], -1)
    # log p is clamped because 0 times infinity would be NaN; p underflows to 0 far above log p = -1000.
    found = 0 - (log_p.exp() * log_p.clamp(min=-1000)).sum(-1)
    return found if idle is None else found.masked_fill(idle, 0)


def _activated(z: Tensor, softcap: float | None, scale: float, slope: bool) -> tuple[Tensor, Tensor | None]:
    """Return x, and with `slope` 1 - tanh^2; None instead if there is no softcap."""
    x = z if scale == 1 else z * scale
    if softcap is None:
        return x, None
    tanh = torch.tanh(x / softcap)
    return softcap * tanh, 1 - tanh.square() if slope else None


def _between(beta: float, x: Tensor, t: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """Return the divergence (R,) of full distributions, and if `wanted` its derivative (R, V) with respect to x."""
    # A softmax is more accurate than the exponential of the rounded log-softmax.
    p, q = torch.softmax(x, -1), torch.softmax(t, -1)
    log_p, log_q = torch.log_softmax(x, -1), torch.log_softmax(t, -1)
    if beta == 0:
        return _gaps(q, p, log_p - log_q).sum(-1), p - q if wanted else None
    apart = log_q - log_p
    if beta == 1:
        return _gaps(p, q, apart).sum(-1), _pulled(p, apart) if wanted else None
    # log m - log p = log((1 - beta) + beta e^apart), and similarly log m - log q; start from the larger of p and q.
    share = torch.where(apart > 0, apart.new_full((), 1 - beta), apart.new_full((), beta))
    common = torch.log1p(share * torch.expm1(-apart.abs()))
    from_p, from_q = common + apart.clamp(min=0), common - apart.clamp(max=0)
    m = (1 - beta) * p + beta * q
    found = beta * _gaps(q, m, from_q).sum(-1) + (1 - beta) * _gaps(p, m, from_p).sum(-1)
    return found, _pulled(p, from_p) * (1 - beta) if wanted else None


def _gaps(w: Tensor, o: Tensor, u: Tensor) -> Tensor:
    """Return w (e^u - 1 - u) for o = w e^u, computed as o - w - w u if e^u is large; o where w is 0."""
    near = u.clamp(max=1)
    gap = torch.where(u > 1, o - w - w * u, w * (torch.expm1(near) - near).clamp(min=0))
    return torch.where(w == 0, o, gap)


def _pulled(p: Tensor, u: Tensor) -> Tensor:
    """Return p (sum_c p_c u_c - u); 0 where p is 0.

    u of the most probable class is subtracted from u first: if that class has nearly all probability, its u differs
    from the mean by much less than either is, and the difference would cancel.
    """
    u = u - u.gather(1, p.argmax(-1, keepdim=True))
    mean = torch.where(p == 0, 0, p * u).sum(-1, keepdim=True)
    return torch.where(p == 0, 0, p * (mean - u))


def _from_top_k(tail: str, x: Tensor, teacher: TopK, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """Return the divergence (R,) from K classes of each row, and if `wanted` its derivative (R, V)."""
    log_p = torch.log_softmax(x, -1)
    known = teacher.log_q != -torch.inf
    inside = known & (teacher.ids >= 0) & (teacher.ids < log_p.shape[1])
    ids, log_q = teacher.ids.masked_fill(~inside, 0), teacher.log_q
    if tail == "renormalize":
        log_q = log_q - log_q.logsumexp(-1, keepdim=True)
    q = torch.where(known, log_q.exp(), 0)
    log_p_k = log_p.gather(1, ids)
    mass = q.sum(-1)
    if tail != "bucket":
        found = torch.where(known, q * (log_q - log_p_k), 0).sum(-1)
        if not wanted:
            return found, None
        return found, (torch.softmax(x, -1) * mass[:, None]).scatter_add_(1, ids, -q)
    # Padding entries have +inf, which does not change the class that they point to.
    removed = torch.where(known, -torch.inf, torch.inf).to(log_p.dtype)
    others = log_p.scatter_reduce(1, ids, removed, "amin")
    log_p_left = others.logsumexp(-1)
    left = (1 - mass).clamp(min=0)
    # The remaining mass is only rounding if no other class can have it.
    left = left.masked_fill((log_p_left == -torch.inf) & (left <= teacher.tolerance), 0)
    p_k = torch.where(known, log_p_k.exp(), 0)
    cells = torch.where(known, _gaps(q, p_k, log_p_k - log_q), 0).sum(-1)
    found = cells + _gaps(left, log_p_left.exp(), log_p_left - left.log()) + (mass + left - 1)
    if not wanted:
        return found, None
    derivative = (torch.softmax(x, -1) * (mass + left)[:, None]).scatter_add_(1, ids, -q)
    shares = torch.softmax(others, -1) * left[:, None]
    return found, derivative - torch.where(left[:, None] == 0, 0, shares)
