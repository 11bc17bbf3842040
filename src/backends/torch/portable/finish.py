"""From the sums of rows to the results of a call: their exchange, the one `finish` of PyTorch, and the reductions.

Sums are packed for the ranks and backward passes that need them. Those of ranks are added in rank order, so that all
ranks get the same bits.

With the sums of `xent.backends.torch.contract` relative to `peak`, the row's gradient factor r, and upstream gradients
u, n, v of lse, nll and entropy H, `Finished` computes losses, statistics and coefficients of the gradient::

    own = e^(x_y - peak)      total = rest + own      lse = peak + log total      nll = log(1 + rest / own)
    H   = (rest log total - mixed + own nll) / total
    gamma = r (1-e) w_y + n         excess = r (e/V) W + 2 r zeta lse + u - v H          beta = -v / total
    alpha = (gamma + excess + v log total) / total
    at_target = (own excess - rest gamma - v own log p_y) / total - r (e/V) w_y

For class probabilities q, gamma is r sum_c w'_c + n sum_c q_c, and every class is one of the others.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Setting, smooths, wide
from xent.backends.torch.devices import looks_at_targets
from xent.backends.torch.portable.facts import Facts, Index, activate, at, divided, slope, times
from xent.backends.torch.portable.rows import Coefficients

__all__ = ["Finished", "Results", "merge", "pack"]

_SMALLEST_OWN = 1e-19  # rest / own is finite above: rest is below 2^60
_CLASSES = ("place", "truth", "id")


def pack(names: tuple[str, ...], sums: dict[str, Tensor]) -> Tensor:
    """Return the sums (R,) by name as (K, R). Classes are stored bit by bit as floats."""
    dtype = sums[names[0]].dtype
    kind = torch.int64 if dtype == torch.float64 else torch.int32
    return torch.stack([sums[name].to(kind).view(dtype) if name in _CLASSES else sums[name] for name in names])


def merge(names: tuple[str, ...], packed: Tensor) -> dict[str, Tensor]:
    """Return the sums (R,) by name of all ranks' sums (ranks, K, R); NaN in rows whose target differs among ranks."""
    kind = torch.int64 if packed.dtype == torch.float64 else torch.int32
    given = dict(zip(names, packed.unbind(1), strict=True))
    given |= {name: given[name].view(kind).to(torch.int64, copy=True) for name in _CLASSES if name in given}
    if len(packed) == 1:
        return {name: one[0] for name, one in given.items()}
    found = {name: _added(one) for name, one in given.items()}
    for side in ("", "teacher_", "others_"):
        if side + "peak" not in given:
            continue
        # Sums relative to the peak of a rank become sums relative to the peak of all.
        peaks = given[side + "peak"]
        peak = found[side + "peak"] = peaks.amax(0)
        growth, factors = peak - peaks, (peaks - peak).exp()
        found[side + "rest"] = _added(given[side + "rest"] * factors)
        if side:
            continue
        if "mixed" in given:
            found["mixed"] = _added(factors * (given["mixed"] - growth * given["rest"]))
        if "squares" in given:
            found["squares"] = _added(factors.square() * given["squares"])
        for name, count in (("below", "weights"), ("cost", "mass"), ("surprise", "given"), ("deficit", "counted")):
            if name in given:
                moved = given[name] + (given[count] * growth).masked_fill(given[count] == 0, 0)
                found[name] = _added(moved)
    for key, place in (("key", "place"), ("likely", "truth")):
        if key in given:
            # The lowest class with the largest key; NaN counts as the largest.
            largest = found[key] = given[key].amax(0)
            wins = (given[key] == largest) | (given[key].isnan() & largest.isnan())
            found[place] = torch.where(wins, given[place], torch.iinfo(torch.int64).max).amin(0)
    found |= {name: one.amax(0) for name, one in given.items() if name.startswith("known")}
    if "teacher_top" in given:
        found["teacher_top"] = given["teacher_top"].gather(0, given["peak"].argmax(0, keepdim=True))[0]
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


def _added(values: Tensor) -> Tensor:
    """Sum (ranks, ...) over ranks, in rank order."""
    total, *others = values.unbind(0)
    for other in others:
        total = total + other
    return total


class Finished:
    """R rows with merged sums, (R,) each."""

    _own: Any = None
    _nll: Any = None
    _beyond: Any = None
    """(R,) bool: rows whose target is outside the support; None without a support."""

    def __init__(self, setting: Setting, facts: Facts, sums: dict[str, Tensor], index: Index) -> None:
        self._setting, self._facts, self._sums, self._index = setting, facts, sums, index
        self._total = sums["rest"]
        self._activation = activation = facts.activation
        if activation.temperature is not None:
            self._activation = activation = activation._replace(temperature=at(activation.temperature, index))
        distance: Any = None
        if "target" in sums:
            x_y = sums["target"]
            if not facts.plain:
                x_y = x_y.clone()
                activate(x_y, activation)
            distance = x_y - sums["peak"]
            own = distance.exp()
            if facts.support is not None:
                classes, valid, _ = facts.support.of(index)
                self._beyond = ~((classes == at(facts.target, index)[:, None]) & valid).any(-1)
                own.masked_fill_(self._beyond, 0)
            self._own, self._total = own, sums["rest"] + own
        self.log_sum = self._total.log()
        if self._own is not None:
            near = sums["rest"].div(self._own).log1p_()
            nll = torch.where(self._own > _SMALLEST_OWN, near, self.log_sum - distance)
            self._nll = nll if self._beyond is None else nll.masked_fill(self._beyond, torch.inf)

    def entropy(self) -> Tensor:
        """Return the entropy, 0 without any class."""
        sums = self._sums
        found = sums["rest"] * self.log_sum - sums["mixed"]
        if self._nll is not None:
            found = found + times(self._own, self._nll)
        found = found / self._total
        return found if self._beyond is None else found.masked_fill(self._total == 0, 0)

    def results(self) -> dict[str, Tensor]:
        """Return the losses, and what the statistics need, by name."""
        options, sums, nll, beyond = self._setting.call.options, self._sums, self._nll, self._beyond
        stats, smoothing, weight = options.stats, options.label_smoothing, at(self._facts.weight, self._index)
        found = dict[str, Tensor]()
        if nll is None:
            loss = sums["cost"] + times(sums["mass"], self.log_sum)
        else:
            w_y = sums.get("row_weight", 1)
            loss = times(w_y * (1 - smoothing), nll)
            if "below" in sums:
                others = sums["below"] + sums["weights"] * self.log_sum
                loss = loss + smoothing / self._setting.vocabulary * (others + times(w_y, nll))
        loss = loss if weight is None else weight * loss
        if smooths(options.z_loss) or "z_loss" in stats:
            z_term = times(options.z_loss, (sums["peak"] + self.log_sum).square())
            z_term = z_term if weight is None else z_term * weight
            found["z_loss"], loss = z_term, loss + z_term if smooths(options.z_loss) else loss
        found["loss"] = loss
        if "lse" in stats:
            found["lse"] = sums["peak"] + self.log_sum
        if "nll" in stats:
            found["nll"] = sums["surprise"] + times(sums["given"], self.log_sum) if nll is None else nll.clone()
        if "entropy" in stats:
            found["entropy"] = self.entropy()
        if "place" in sums:
            found["predictions"] = sums["place"]
        if "truth" in sums:
            found["truth"] = sums["truth"]
        if "squares" in sums:
            squares = sums["squares"] if self._own is None else sums["squares"] + self._own.square()
            of_square = squares.log() - 2 * self.log_sum
            none = self._total == 0
            found["log_sum_sq_probs"] = of_square if beyond is None else of_square.masked_fill(none, -torch.inf)
        if "deficit" in sums:
            mean = sums["peak"] - sums["deficit"] / sums["counted"].clamp(min=1)
            found["mean_logit"] = mean if beyond is None else mean.masked_fill(sums["counted"] == 0, 0)
        return found

    def coefficients(self) -> Coefficients:
        """Return the coefficients of the gradient, with the upstream gradients in the facts."""
        facts, sums, options, beyond = self._facts, self._sums, self._setting.call.options, self._beyond
        peak, total, own = sums["peak"], self._total, self._own
        scale, _, temperature = self._activation
        linear = scale if temperature is None else scale / temperature
        r = at(facts.scale, self._index) * linear
        of_lse, of_nll, of_entropy = [
            None if one is None else at(one, self._index) * linear for one in facts.upstream[1:]
        ]
        zero, invalid = at(facts.dead, self._index), None
        if beyond is not None:
            invalid, r = at(facts.invalid, self._index), _each(r, total).masked_fill(beyond, 0)
            of_nll = None if of_nll is None else of_nll.masked_fill(beyond, 0)
        beta, move, excess, delta = None, 0, 0 if of_lse is None else of_lse, None
        if smooths(options.z_loss):
            excess = excess + 2 * options.z_loss * r * (peak + self.log_sum)
        if of_entropy is not None:
            excess = excess - of_entropy * self.entropy()
            beta, move = -of_entropy / total, of_entropy * self.log_sum
        if own is None:
            gamma = r * sums["mass"]
            gamma = gamma if of_nll is None else gamma + of_nll * sums["given"]
            return Coefficients(peak, (gamma + excess + move) / total, beta, None, _each(r, total), of_nll, None, zero)
        w_y = sums.get("row_weight", 1)
        gamma = r * w_y
        if "below" in sums:
            gamma = gamma * (1 - options.label_smoothing)
            delta = _each(r * (options.label_smoothing / self._setting.vocabulary), total)
            excess = excess + delta * (sums["weights"] + w_y)
        gamma = gamma if of_nll is None else gamma + of_nll
        g_y = (own * excess - sums["rest"] * gamma) / total
        if beta is not None:
            g_y = g_y - times(own, beta * self._nll)
        if delta is not None:
            g_y = g_y - delta * w_y
        if self._activation.softcap is not None:
            g_y = g_y * slope(sums["target"], self._activation)
        return Coefficients(peak, (gamma + excess + move) / total, beta, delta, None, None, g_y, zero, invalid)


def _each(value: Any, like: Tensor) -> Tensor:
    """Return a number or tensor as (R,)."""
    made: Tensor = torch.zeros_like(like) + value
    return made


class Results:
    """Results (N,) by name; those of rows that are never recorded are 0."""

    def __init__(self, setting: Setting, facts: Facts) -> None:
        self._setting, self._facts = setting, facts
        self._found: dict[str, Tensor] = {}

    def record(self, found: dict[str, Tensor], index: Index) -> None:
        """Record values (R,) of some rows."""
        for name, values in found.items():
            if index is None:
                self._found[name] = values
                continue
            if name not in self._found:
                self._found[name] = values.new_zeros(self._setting.count)
            self._found[name][index] = values

    def values(self) -> list[Tensor]:
        """Return the loss, then the statistics in the order of the options; those per row as (N,)."""
        return [self._value(name) for name in ("loss", *self._setting.call.options.stats)]

    def _value(self, name: str) -> Any:
        """Return a result."""
        setting, facts, options = self._setting, self._facts, self._setting.call.options
        ignored, count, device, dtype = facts.ignored, setting.count, setting.device, wide(setting.compute)
        if name == "count":
            return (~ignored).sum() if ignored is not None else torch.full((), count, dtype=torch.int64, device=device)
        if name == "accuracy":
            correct = self._value("predictions") == (self._value("truth") if facts.target is None else facts.target)
            correct = correct if facts.invalid is None else correct & ~facts.invalid
            if options.accuracy_of_rows:
                return correct.to(dtype)
            return correct.sum().to(dtype) / self._value("count").clamp(min=1)
        values = self._found.get(name)
        if values is None:
            kind = torch.int64 if name in ("predictions", "truth") else dtype
            values = torch.zeros(count, dtype=kind, device=device)
        if name in ("loss", "z_loss"):
            values = values if facts.dead is None else values.masked_fill(facts.dead, 0)
            return values if options.reduction == "none" else divided(values.sum(), facts.divisor)
        if name == "nll" and facts.invalid is not None:
            values = values.masked_fill(facts.invalid, torch.nan)
        return values if ignored is None else values.masked_fill(ignored, -1 if name == "predictions" else 0)
