"""Checks of a top-k teacher's classes and log-probabilities."""

import torch
from torch import Tensor

from xent.backends.torch.contract import Setting, wide
from xent.backends.torch.devices import looks_at_targets
from xent.core.arrays import dtype_name
from xent.core.call import TopK, array_of
from xent.core.spec import mass_tolerance

__all__ = ["impossible", "tolerance"]


def tolerance(teacher: TopK) -> float:
    """Return how far rounding may raise the sum of probabilities above 1."""
    return mass_tolerance(dtype_name(teacher.log_probs))


def impossible(teacher: TopK, setting: Setting, ignored: Tensor | None) -> Tensor:
    """Return the rows (N,) with invalid values, but for ignored ones. Raise an error if values may be read."""
    ids, log_q = teacher.ids.to(torch.int64), teacher.log_probs.to(wide(setting.compute))
    known = log_q != -torch.inf
    outside = known & ((ids < 0) | (ids >= setting.vocabulary))
    # Padding entries get distinct negative numbers.
    numbered = torch.where(known, ids, -1 - torch.arange(ids.shape[1], device=ids.device))
    ordered = numbered.sort(-1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    mass = log_q.exp().sum(-1)
    heavy = ~(mass <= 1 + tolerance(teacher))
    empty = mass == 0 if teacher.tail == "renormalize" else torch.zeros_like(heavy)
    wrong: Tensor = outside.any(-1) | repeated | heavy | empty
    wrong = wrong if ignored is None else wrong & ~ignored
    if looks_at_targets(wrong.device) and bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        position = torch.unravel_index(torch.tensor(row), array_of(setting.call).shape[:-1])
        name = f"of row {[int(place) for place in position]}"
        if bool(outside[row].any()):
            found = int(ids[row][outside[row]][0])
            raise IndexError(f"teacher.ids {name} holds {found}; classes are 0 to {setting.vocabulary - 1}")
        if bool(repeated[row]):
            raise ValueError(f"teacher.ids {name} holds a class more than once")
        if bool(empty[row]):
            raise ValueError(f"teacher.log_probs {name} have no mass that could be renormalised")
        raise ValueError(
            f"teacher.log_probs {name} have a mass of {float(mass[row]):.6g}, more than 1 by more than rounding"
        )
    return wrong
