"""Data of each row of a divergence that does not depend on logits: weight, gradient factor, top-k classes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.divergence.call import Divergence
from xent.core.arrays import dtype_name
from xent.core.teachers import mass_tolerance

__all__ = ["RowFacts", "TopK", "gather_facts", "gather_top_k"]


@dataclass(frozen=True, eq=False)
class TopK:
    """A top-k teacher's classes and log-probabilities for R rows, in the accumulation dtype."""

    ids: Tensor
    """(R, K) int64 in [0, V); 0 for padding entries."""
    log_q: Tensor
    """(R, K); -inf for padding entries."""
    tolerance: float
    """How far rounding may raise the sum of probabilities above 1."""

    def of(self, rows: slice | Tensor) -> "TopK":
        """Return the classes of some rows."""
        return TopK(self.ids[rows], self.log_q[rows], self.tolerance)


@dataclass(frozen=True, eq=False)
class RowFacts:
    """R rows of a call; all tensors (R,), in the accumulation dtype or bool."""

    weight: Tensor
    """a_i; NaN in rows with invalid teacher values."""
    scale: Tensor
    """Gradient factor: a_i, divided by the divisor for "mean", times the upstream gradient if it is known."""
    dead: Tensor | None
    """Rows whose loss and gradient are exactly 0; None if it is known that there are none."""
    idle: Tensor | None
    """Dead rows of which nothing is computed: all, but with an entropy only those with weight 0."""

    def of(self, rows: slice | Tensor) -> "RowFacts":
        """Return the facts of some rows."""
        dead = None if self.dead is None else self.dead[rows]
        idle = dead if self.idle is self.dead or self.idle is None else self.idle[rows]
        return RowFacts(self.weight[rows], self.scale[rows], dead, idle)


def gather_facts(
    call: Divergence, upstream: Tensor | None, top_k: TopK | None
) -> tuple[RowFacts, Tensor | None, Tensor | None]:
    """Return the facts of all rows, the divisor of the mean, and the deferred factor of gradients.

    `upstream` is the gradient of the rows' losses, or of the reduced loss.
    """
    acc, device, count = call.accumulation, call.student.device, call.rows.numel()
    if call.sample_weight is None:
        weight = torch.ones(count, dtype=acc, device=device)
    else:
        weight = call.sample_weight.to(acc).flatten()
    divisor = _divisor(call, weight) if call.reduction == "mean" else None
    dead = idle = weight == 0
    if divisor is not None:
        dead = dead | (divisor == 0)
    if upstream is not None or not call.entropy:
        idle = dead
    if top_k is not None:
        weight = weight.masked_fill(_impossible(call, top_k, dead), torch.nan)
    scale, deferred = weight, None
    narrow = call.weight is not None and call.compute == torch.float16 and call.reduction != "none"
    if divisor is not None or narrow:
        inverse = weight.new_ones(()) if divisor is None else torch.where(divisor == 0, 0, 1 / divisor)
        if narrow:
            # With 1/D, float16 gradients would underflow before the loss scale is multiplied in.
            largest = weight.abs().nan_to_num()
            size = largest.amax() if count else weight.new_ones(())
            size = torch.where(size == 0, 1, size)
            scale, deferred = weight / size, inverse * size
        else:
            scale = weight * inverse
    if upstream is not None:
        scale = scale * upstream.to(acc).flatten()
    known_alive = device.type == "cpu" and not bool(dead.any())
    if known_alive:
        return RowFacts(weight, scale, None, None), divisor, deferred
    return RowFacts(weight, scale, dead, idle), divisor, deferred


def gather_top_k(call: Divergence) -> TopK | None:
    """Return the classes of a top-k teacher, None for other teachers. `gather_facts` checks the range of ids."""
    if not call.tail:
        return None
    assert call.teacher_weight is not None
    count = call.rows.numel()
    ids = call.teacher.to(torch.int64).reshape(count, call.teacher.shape[-1])
    log_q = call.teacher_weight.to(call.accumulation).reshape(ids.shape)
    return TopK(ids, log_q, mass_tolerance(dtype_name(call.teacher_weight)))


def _divisor(call: Divergence, weight: Tensor) -> Tensor:
    given = call.normalizer
    if given is None:
        return weight.sum()
    if isinstance(given, Tensor) and given.device == weight.device:
        return given.to(weight.dtype)
    return torch.full((), float(given), dtype=weight.dtype, device=weight.device)


def _impossible(call: Divergence, top_k: TopK, dead: Tensor) -> Tensor:
    """Return the rows (N,) with invalid teacher values, except dead ones. Raise an error if values may be read."""
    known = top_k.log_q != -torch.inf
    outside = known & ((top_k.ids < 0) | (top_k.ids >= call.vocabulary))
    # Padding entries get distinct negative numbers.
    numbered = torch.where(known, top_k.ids, -1 - torch.arange(top_k.ids.shape[1], device=top_k.ids.device))
    ordered = numbered.sort(-1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    mass = top_k.log_q.exp().sum(-1)
    heavy = ~(mass <= 1 + top_k.tolerance)
    empty = mass == 0 if call.tail == "renormalize" else torch.zeros_like(heavy)
    wrong = (outside.any(-1) | repeated | heavy | empty) & ~dead
    if looks_at_targets(dead.device) and bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        position = [int(index) for index in torch.unravel_index(torch.tensor(row), call.rows)]
        name = f"of row {position}"
        if bool(outside[row].any()):
            found = int(top_k.ids[row][outside[row]][0])
            raise IndexError(f"teacher.ids {name} holds {found}; classes are 0 to {call.vocabulary - 1}")
        if bool(repeated[row]):
            raise ValueError(f"teacher.ids {name} holds a class more than once")
        if bool(empty[row]):
            raise ValueError(f"teacher.log_probs {name} have no mass that could be renormalised")
        raise ValueError(
            f"teacher.log_probs {name} have a mass of {float(mass[row]):.6g}, more than 1 by more than rounding"
        )
    return wrong
