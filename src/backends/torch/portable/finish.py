"""From the sums of rows to the results of a call: their exchange, the one `finish` of PyTorch, and the reductions.

Sums are packed for the ranks and backward passes that need them. Those of ranks are added in rank order, so that all
ranks get the same bits.

With the sums of `xent.backends.torch.contract` relative to `peak`, the row's gradient factor r, and upstream gradients
u, n, v of lse, nll and entropy H, `finish` computes losses, statistics and coefficients of the gradient::

    own = e^(x_y - peak)      total = rest + own      lse = peak + log total      nll = log(1 + rest / own)
    H   = (rest log total - mixed + own nll) / total
    gamma  = r w'_y + n             excess = r sum_{c != y} w'_c + 2 r zeta lse + u - v H         beta = -v / total
    alpha = (gamma + excess + v log total) / total
    at_target = (own excess - rest gamma - v own log p_y) / total

w'_c is the share of a class in the loss, for class indices w_c ((1-e) [c==y] + e/V). For class probabilities q, gamma
is 0, excess has n sum_c q_c too, and every class is one of the others.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import smooths
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.portable.facts import Facts, Index, activate, at, masked
from xent.backends.torch.portable.rows import times

__all__ = ["finish", "is_largest", "merge", "pack", "record", "result"]

_SMALLEST_OWN = 1e-19  # rest / own is finite above: rest is below 2^60
_CLASSES = ("place", "truth", "id")
_MOVED = {"below": "weights", "cost": "mass", "surprise": "given", "deficit": "counted"}
_EMPTY = {"entropy": 0, "log_sum_sq_probs": -torch.inf, "mean_logit": 0}
"""The statistics of a row without any class in its support."""


def pack(names: tuple[str, ...], sums: dict[str, Tensor]) -> Tensor:
    """Return the sums (R,) by name as (K, R). Classes are stored bit by bit as floats."""
    dtype = sums[names[0]].dtype
    kind = torch.int64 if dtype == torch.float64 else torch.int32
    return torch.stack([sums[name].to(kind).view(dtype) if name in _CLASSES else sums[name] for name in names])


def is_largest(name: str) -> bool:
    """Return whether a sum is the largest value of a row."""
    return name.endswith("peak") or name.startswith("known") or name in ("key", "likely")


def merge(names: tuple[str, ...], packed: Tensor) -> dict[str, Tensor]:
    """Return the sums (R,) by name of all ranks' sums (ranks, K, R); NaN in rows whose target differs among ranks."""
    kind = torch.int64 if packed.dtype == torch.float64 else torch.int32
    given = dict(zip(names, packed.unbind(1), strict=True))
    given |= {name: given[name].view(kind).to(torch.int64, copy=True) for name in _CLASSES if name in given}
    if len(packed) == 1:
        return {name: one[0] for name, one in given.items()}
    found = {name: one.amax(0) for name, one in given.items() if is_largest(name)}
    for side in ("", "teacher_", "others_"):
        if side + "peak" not in given:
            continue
        # Sums relative to the peak of a rank become sums relative to the peak of all.
        growth = found[side + "peak"] - given[side + "peak"]
        factors, rest = (-growth).exp(), given[side + "rest"]
        given[side + "rest"] = rest * factors
        if side:
            continue
        if "mixed" in given:
            given["mixed"] = factors * (given["mixed"] - growth * rest)
        if "squares" in given:
            given["squares"] = factors.square() * given["squares"]
        for name, count in _MOVED.items():
            if name in given:
                given[name] = given[name] + (given[count] * growth).masked_fill(given[count] == 0, 0)
    for key, place in (("key", "place"), ("likely", "truth")):
        if key in given:
            # The lowest class with the largest key; NaN counts as the largest.
            wins = (given[key] == found[key]) | (given[key].isnan() & found[key].isnan())
            found[place] = torch.where(wins, given[place], torch.iinfo(torch.int64).max).amin(0)
    if "teacher_top" in given:
        found["teacher_top"] = given["teacher_top"].gather(0, given["peak"].argmax(0, keepdim=True))[0]
    if "id" in given:
        found["id"] = given["id"][0]
        given["rest"] = given["rest"].masked_fill(_differing(given["id"]), torch.nan)
    for name, (total, *others) in given.items():
        if name not in found:
            for other in others:  # in rank order
                total = total + other
            found[name] = total
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


def finish(
    facts: Facts, sums: dict[str, Tensor], index: Index, wanted: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the results of R rows with merged sums, and the coefficients of a `wanted` gradient; all (R,), by name.

    The results are losses, and what the statistics need. The coefficients use the upstream gradients in the facts; they
    are None for 0. `zero`: (R,) bool, rows whose gradient is exactly 0, whatever their logits are.
    """
    options, peak, rest, weight = facts.setting.call.options, sums["peak"], sums["rest"], at(facts.weight, index)
    smoothing, z_loss, stats = options.label_smoothing, options.z_loss, options.stats
    activation = facts.activation._replace(temperature=at(facts.activation.temperature, index))
    spread, total, distance, beyond = smoothing / facts.setting.vocabulary, rest, rest, None
    own: Any = None
    nll: Any = None
    mass: Any = None
    entropy: Any = None
    loss: Any = 0
    w_y: Any = 0
    if "target" in sums:
        x_y = sums["target"]
        if not facts.plain:
            activate(x_y := x_y.clone(), activation)
        distance = x_y - peak
        own = distance.exp()
        if facts.support is not None:
            beyond = sums["target"] == -torch.inf  # rows whose target is outside the support
            own.masked_fill_(beyond, 0)
        total = rest + own
    log_sum = total.log()
    if own is not None:
        nll = masked(torch.where(own > _SMALLEST_OWN, (rest / own).log1p(), log_sum - distance), beyond, torch.inf)
        w_y = sums.get("row_weight", 1) * (1 - smoothing + spread)
        loss = times(w_y, nll)
    elif "surprise" in sums:
        nll = sums["surprise"] + times(sums["given"], log_sum)
    # What the shares in the sums, which are those of the classes but the target, have to be multiplied by.
    share = 1 if "cost" in sums else spread if "below" in sums else None
    if share is not None:
        cost, mass = (share * sums[name] for name in (("cost", "mass") if own is None else ("below", "weights")))
        loss = loss + cost + times(mass, log_sum)
    found = {name: sums[key] for name, key in (("predictions", "place"), ("truth", "truth")) if key in sums}
    found["loss"], lse = weight * loss, peak + log_sum
    if smooths(z_loss) or "z_loss" in stats:
        found["z_loss"] = z_term = weight * times(z_loss, lse.square())
        found["loss"] = found["loss"] + z_term
    if "lse" in stats:
        found["lse"] = lse
    if "nll" in stats:
        found["nll"] = nll
    if "mixed" in sums:
        entropy = rest * log_sum - sums["mixed"]
        entropy = found["entropy"] = (entropy if own is None else entropy + times(own, nll)) / total
    if "squares" in sums:
        found["log_sum_sq_probs"] = (sums["squares"] + (0 if own is None else own.square())).log() - 2 * log_sum
    if "deficit" in sums:
        found["mean_logit"] = peak - sums["deficit"] / sums["counted"].clamp(min=1)
    given: list[Any] = [at(one, index) for one in (facts.scale, *facts.upstream[1:])]
    zero = at(facts.dead, index)
    if beyond is not None:
        empty = total == 0
        found |= {name: found[name].masked_fill(empty, _EMPTY[name]) for name in found.keys() & _EMPTY}
        zero = empty if zero is None else zero | empty
        given[::2] = [None if one is None else one.masked_fill(beyond, 0) for one in given[::2]]
    if not wanted:
        return found, {}
    linear = activation.logit_scale
    linear = linear if activation.temperature is None else linear / activation.temperature
    given = [None if one is None else times(linear, one) for one in given]
    r, of_lse, of_nll, of_entropy = given
    excess: Any = 0 if of_lse is None else of_lse
    gamma, beta, at_target = times(w_y, r), None, None
    if share is not None:
        excess = excess + r * mass
    if smooths(z_loss):
        excess = excess + 2 * z_loss * r * lse
    if of_nll is not None:
        gamma, excess = (gamma + of_nll, excess) if own is not None else (gamma, excess + of_nll * sums["given"])
    alpha = gamma + excess
    if of_entropy is not None:
        excess = excess - of_entropy * entropy
        alpha, beta = gamma + excess + of_entropy * log_sum, -of_entropy / total
    if own is not None:
        at_target = (own * excess - rest * gamma) / total
        at_target = at_target if beta is None else at_target - times(own, beta * nll)
    return found, {
        "peak": peak,
        "alpha": alpha / total,
        "beta": beta,
        "at_target": at_target,
        "zero": zero,
        "share": None if share is None else r * share,
        "given": of_nll if own is None else None,
    }


def record(facts: Facts, found: dict[str, Tensor], index: Index) -> None:
    """Record the results (R,) of some rows; those of rows that are never recorded are 0."""
    count = facts.setting.count
    if isinstance(index, slice) and len(found["loss"]) == count:
        facts.results |= found
        return
    for name, values in found.items():
        facts.results.setdefault(name, values.new_zeros(count))[index] = values


def result(facts: Facts, name: str) -> Any:
    """Return the loss or a statistic; those per row as (N,)."""
    options, ignored, count = facts.setting.call.options, facts.ignored, facts.setting.count
    if name == "count":
        return torch.full((), count, device=facts.weight.device) if ignored is None else (~ignored).sum()
    if name == "accuracy":
        correct = result(facts, "predictions") == (result(facts, "truth") if facts.target is None else facts.target)
        correct = masked(correct, facts.invalid, False)
        if options.accuracy_of_rows:
            return correct.to(facts.dtype)
        return correct.sum().to(facts.dtype) / result(facts, "count").clamp(min=1)
    if name not in facts.results:
        kind = torch.int64 if name in ("predictions", "truth") else facts.dtype
        facts.results[name] = torch.zeros(count, dtype=kind, device=facts.weight.device)
    values = facts.results[name]
    if name in ("loss", "z_loss"):
        values = masked(values, facts.dead, 0)
        return values.sum() / facts.divisor if options.reduction != "none" else values
    if name == "nll":
        values = masked(values, facts.invalid, torch.nan)
    return masked(values, ignored, -1 if name == "predictions" else 0)
