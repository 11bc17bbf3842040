"""The per-row sums that ranks exchange, packed in one tensor, and how the sums of all ranks are merged.

For the classes c of one rank, with raw logits z, x as in `xent.cross_entropy`, target class y, target probabilities q,
class weight w, share w'_c = w_c q'_c of a class in the loss, and `peak`, the largest x other than the target's::

    total   = sum_{c != y} e^(x_c - peak)                   mixed   = sum_{c != y} e^(x_c - peak) (x_c - peak)
    squares = sum_{c != y} e^(2 (x_c - peak))               target  = z_y on the rank that has it, 0 on others
    below   = sum_{c != y} w_c (peak - x_c)
    deficit = sum_c (peak - x_c)                            allowed = number of classes c, with a support
    cost    = sum_c w'_c (peak - x_c)                       mass    = sum_c w'_c
    surprise = sum_c q_c (peak - x_c)                       given   = sum_c q_c
    key, place = the largest logit in the order of x, and its class;    likely, truth = the same of q

All ranks compute the target's x_y and dx/dz from z_y. With a softcap much smaller than z_y, dx/dz computed from x_y
would be mostly rounding error.

With a support, the sums are over the classes in the row's support. The x of all other classes is -inf, also that of a
target outside of the support. Its slot has z_y too, as all ranks know the support.

Every rank gathers the sums of all ranks and adds them in rank order, so that all ranks get the same bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.sharded.layout import Layout
from xent.backends.torch.steps import times
from xent.core.spec import LossSpec

__all__ = ["Merged", "Slots", "finite", "logits_of_targets", "merge", "slots_of"]


class Slots:
    """The rows of a packed (K, N) float tensor, by name. Classes are integers, stored bit by bit as floats."""

    def __init__(self, names: tuple[str, ...], values: Tensor) -> None:
        self.names, self.values = names, values

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        """Return a view (..., N) of the values with that name."""
        return self.values[..., self.names.index(name), :]

    def integers(self, name: str) -> Tensor:
        """Return the same view as int32, or int64 for float64."""
        kind = torch.int64 if self.values.dtype == torch.float64 else torch.int32
        return self[name].view(kind)


def slots_of(spec: LossSpec, probabilities: bool, supported: bool) -> tuple[str, ...]:
    """Return the names of the sums that the loss, its gradient and the statistics need."""
    stats = spec.stats
    names = ["peak", "total"]
    if not probabilities:
        names += ["target"]
        names += ["below"] if spec.label_smoothing else []
    else:
        names += ["cost", "mass"]
        names += ["surprise", "given"] if "nll" in stats else []
        names += ["likely", "truth"] if "accuracy" in stats else []
    names += ["mixed"] if "entropy" in stats else []
    names += ["squares"] if "log_sum_sq_probs" in stats else []
    names += ["deficit", *(["allowed"] if supported else [])] if "mean_logit" in stats else []
    names += ["key", "place"] if "predictions" in stats or "accuracy" in stats else []
    return tuple(names)


def logits_of_targets(sums: Slots) -> Tensor:
    """Return z_y of each row, (N,), from the sums of all ranks, (ranks, K, N)."""
    return _added(sums["target"])


class Merged(NamedTuple):
    """Results over all classes, each (N,), relative to `peak`, the largest x of all classes. None if not requested."""

    peak: Tensor
    log_sum: Tensor
    """log sum_c e^(x_c - peak)."""
    log_p: Tensor | None = None
    """log p_y."""
    below: Tensor | None = None
    """sum_c w_c (peak - x_c)."""
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None
    cost: Tensor | None = None
    mass: Tensor | None = None
    surprise: Tensor | None = None
    given: Tensor | None = None
    predictions: Tensor | None = None
    truth: Tensor | None = None


def merge(
    sums: Slots,
    layout: Layout,
    classes: Tensor | None,
    target: Tensor | None,
    row_weight: Tensor | None,
    rank_weights: Tensor | None,
    supported: bool,
) -> Merged:
    """Merge the sums of all ranks, (ranks, K, N).

    `classes` (N,) are the target classes, `target` (N,) their x_y, `row_weight` (N,) their weights w_y, and
    `rank_weights` (ranks,) the sum of w over each rank's classes; both weights are None if all weights are 1.
    `supported`: a row may have no class at all.
    """
    peaks = sums["peak"]
    peak = peaks.amax(0) if target is None else torch.maximum(peaks.amax(0), target)
    reference = finite(peak)
    factors, growth = (peaks - reference).exp(), reference - finite(peaks)
    others = _added(sums["total"] * factors)
    mixed = _added(factors * (sums["mixed"] - growth * sums["total"])) if "mixed" in sums else None
    squares = _added(factors.square() * sums["squares"]) if "squares" in sums else None
    found: dict[str, Tensor] = {}
    if target is None:
        total, log_sum = others, others.log()
    else:
        distance = target - reference
        own = distance.exp()
        total = others + own
        # If the target is the largest, use log1p of the sum of the others, which keeps precision if that sum is small.
        log_sum = torch.where(target == peak, others.log1p(), total.log())
        log_p = distance - log_sum
        found["log_p"] = log_p
        mixed = None if mixed is None else mixed + times(own, distance)
        squares = None if squares is None else squares + own.square()
        if "below" in sums and classes is not None:
            owners = layout.owners(classes)
            found["below"] = _below(sums["below"], growth, layout, owners, row_weight, rank_weights, -distance)
    if mixed is not None:
        found["entropy"] = log_sum - mixed / total
    if squares is not None:
        found["log_sum_sq_probs"] = squares.log() - 2 * log_sum
    if "deficit" in sums:
        found["mean_logit"] = _mean(sums, layout, reference, growth)
    for of, weights in (("cost", "mass"), ("surprise", "given")):
        if of in sums:
            found[of] = _added(sums[of] + times(sums[weights], growth))
            found[weights] = _added(sums[weights])
    for key, place, name in (("key", "place", "predictions"), ("likely", "truth", "truth")):
        if key in sums:
            found[name] = _first_of_largest(sums[key], sums.integers(place))
    made = Merged(peak, log_sum, **found)
    return _without_classes(made, total == 0) if supported else made


def _without_classes(rows: Merged, empty: Tensor) -> Merged:
    """Replace NaN (from -inf - -inf) in rows without any class, where `empty` is true."""
    found = {"log_p": -torch.inf, "entropy": 0.0, "log_sum_sq_probs": -torch.inf}
    present = {name: getattr(rows, name) for name in found if getattr(rows, name) is not None}
    return rows._replace(**{name: values.masked_fill(empty, found[name]) for name, values in present.items()})


def _mean(sums: Slots, layout: Layout, reference: Tensor, growth: Tensor) -> Tensor:
    """Return the mean of x, (N,); 0 for rows without classes."""
    if "allowed" in sums:
        counts = sums["allowed"]
    else:
        counts = layout.on_ranks([float(stop - first) for first, stop in layout.ranges], reference)[:, None]
    return reference - _added(sums["deficit"] + counts * growth) / _added(counts).clamp(min=1)


def _below(
    below: Tensor,
    growth: Tensor,
    layout: Layout,
    owners: Tensor,
    row_weight: Tensor | None,
    rank_weights: Tensor | None,
    of_target: Tensor,
) -> Tensor:
    """Return sum_c w_c (peak - x_c), (N,), over all classes including the target."""
    if rank_weights is None or row_weight is None:
        counts = [float(stop - first) for first, stop in layout.ranges]
        others = layout.on_ranks(counts, below)[:, None] - owners.to(below.dtype)
        return _added(below + times(others, growth)) + of_target
    others = rank_weights[:, None] - torch.where(owners, row_weight, 0)
    return _added(below + times(others, growth)) + times(row_weight, of_target)


def finite(peak: Tensor) -> Tensor:
    """Return `peak`, or 0 where it is -inf, to subtract from x before taking exponentials."""
    return peak.masked_fill(peak == -torch.inf, 0)


def _added(values: Tensor) -> Tensor:
    """Sum (ranks, N) over ranks, in rank order."""
    total, *others = values.unbind(0)
    for other in others:
        total = total + other
    return total


def _first_of_largest(keys: Tensor, places: Tensor) -> Tensor:
    """Return the lowest class with the largest key, (N,) int64. NaN counts as the largest."""
    largest = keys.amax(0)
    wins = (keys == largest) | (keys.isnan() & largest.isnan())
    return torch.where(wins, places.to(torch.int64), torch.iinfo(torch.int64).max).amin(0)
