"""The packed sums of rows that ranks exchange and backward passes save, and how those of all ranks are merged.

Ranks are added in rank order, so that all ranks get the same bits.
"""

import torch
from torch import Tensor

from xent.backends.torch.devices import looks_at_targets

__all__ = ["added", "merge", "normalizers", "pack"]

_CLASSES = ("place", "truth", "id")


def pack(names: tuple[str, ...], sums: dict[str, Tensor]) -> Tensor:
    """Return the sums (R,) by name as (K, R). Classes are stored bit by bit as floats."""
    dtype = sums["peak"].dtype
    kind = torch.int64 if dtype == torch.float64 else torch.int32
    return torch.stack([sums[name].to(kind).view(dtype) if name in _CLASSES else sums[name] for name in names])


def merge(names: tuple[str, ...], packed: Tensor) -> dict[str, Tensor]:
    """Return the sums (R,) by name of all ranks' sums (ranks, K, R); NaN in rows whose target differs among ranks."""
    kind = torch.int64 if packed.dtype == torch.float64 else torch.int32
    by_name = dict(zip(names, packed.unbind(1), strict=True))
    given = {
        name: one.view(kind).to(torch.int64, copy=True) if name in _CLASSES else one for name, one in by_name.items()
    }
    if len(packed) == 1:
        return {name: one[0] for name, one in given.items()}
    peaks = given["peak"]
    peak = peaks.amax(0)
    growth, factors = peak - peaks, (peaks - peak).exp()
    # Sums relative to the peak of a rank become sums relative to the peak of all.
    moved = {"rest": given["rest"] * factors}
    if "mixed" in given:
        moved["mixed"] = factors * (given["mixed"] - growth * given["rest"])
    if "squares" in given:
        moved["squares"] = factors.square() * given["squares"]
    for name, count in (("below", "weights"), ("cost", "mass"), ("surprise", "given"), ("deficit", "counted")):
        if name in given:
            moved[name] = given[name] + (given[count] * growth).masked_fill(given[count] == 0, 0)
    found = {name: added(one) for name, one in (given | moved).items() if name not in (*_CLASSES, "peak")}
    found["peak"] = peak
    for key, place in (("key", "place"), ("likely", "truth")):
        if key in given:
            found[key] = given[key].amax(0)
            found[place] = _first_of_largest(given[key], given[place])
    if "id" in given:
        found["id"] = given["id"][0]
        found["rest"].masked_fill_(_differing(given["id"]), torch.nan)
    return found


def _differing(ids: Tensor) -> Tensor:
    """Return the rows whose target (ranks, R) is not the same on all ranks. Raise an error if values may be read."""
    differs = ids != ids[0]
    if looks_at_targets(ids.device) and bool(differs.any()):
        rank = int(differs.any(-1).nonzero()[0])
        raise ValueError(
            f"target must be the same on all ranks of the group, and that of rank {rank} differs from that of rank "
            "0. With data parallelism each rank has other tokens and the whole classifier: leave out vocab_parallel; "
            "where FSDP2 has the classifier in pieces, make the call in the forward of the module that holds it"
        )
    return differs.any(0)


def normalizers(x: Tensor, mixed: bool = False) -> tuple[Tensor, ...]:
    """Return the sums "peak" and "rest" of x (R, C), and if asked for "mixed". The peak is finite: C may be 0."""
    least = torch.finfo(x.dtype).min
    peak = x.amax(-1).clamp(min=least) if x.shape[1] else x.new_full((len(x),), least)
    below = x - peak[:, None]
    e = below.exp()
    return peak, e.sum(-1), *([torch.where(e == 0, 0, e * below).sum(-1)] if mixed else [])


def added(values: Tensor) -> Tensor:
    """Sum (ranks, ...) over ranks, in rank order."""
    total, *others = values.unbind(0)
    for other in others:
        total = total + other
    return total


def _first_of_largest(keys: Tensor, places: Tensor) -> Tensor:
    """Return the lowest class with the largest key, (R,) int64. NaN counts as the largest."""
    largest = keys.amax(0)
    wins = (keys == largest) | (keys.isnan() & largest.isnan())
    return torch.where(wins, places, torch.iinfo(torch.int64).max).amin(0)
