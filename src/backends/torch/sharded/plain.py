"""The steps in PyTorch operations. They work on every device, and use float32 memory for one block of rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

from xent.backends.torch.activation import activate, activate_with_slope
from xent.backends.torch.job import Taken
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.rows import row_sum
from xent.backends.torch.schedule import Part
from xent.backends.torch.sharded.landing import again, land
from xent.backends.torch.sharded.steps import STEPS, Coefficients, Landing, Shard
from xent.backends.torch.sharded.sums import Slots, finite
from xent.backends.torch.steps import target_logits, times
from xent.core.chunks import rows_per_block

__all__ = ["PlainSteps"]


class PlainSteps:
    """See `xent.backends.torch.sharded.steps.Steps`."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.spec = shard, shard.facts.spec

    def take(self, linear: Linear, part: Part) -> Taken:
        """Gather the hidden states of the part and convert them to the compute dtype."""
        facts, rows, count = self.shard.facts, slice(part.start, part.stop), self.shard.layout.count
        hidden = linear.hidden[part.indices]
        hidden = hidden.to(linear.compute)
        trained = hidden if facts.dead is None else hidden.masked_fill(facts.dead[rows, None], 0)
        found = None
        if self.shard.local is not None and linear.compute.itemsize == 2 and count:
            place = self.shard.local[rows].clamp(0, count - 1)
            found = target_logits(hidden, linear.classifier, linear.classifier_bias, place)
        return Taken(hidden, trained, found)

    def fold(self, logits: Tensor, start: int, sums: Slots, target_logits: Tensor | None) -> None:
        """Fold the rows in blocks that fit in the cache."""
        for rows in self._blocks(logits):
            exact = None if target_logits is None else target_logits[rows]
            here = slice(start + rows.start, start + rows.stop)
            _Block(self.shard, logits[rows], here).fold(Slots(sums.names, sums.values[:, rows]), exact)

    def gradient(self, logits: Tensor, start: int, coefficients: Coefficients, grad: Tensor) -> None:
        """Write the gradient in blocks that fit in the cache."""
        for rows in self._blocks(logits):
            here = slice(start + rows.start, start + rows.stop)
            _Block(self.shard, logits[rows], here).gradient(coefficients.of(rows), grad[rows])

    def land(self, sums: Slots, landing: Landing) -> Coefficients | None:
        """Merge the sums in PyTorch operations."""
        return land(self.shard, sums, landing)

    def again(self, kept: Tensor, part: Part) -> Coefficients:
        """Compute the coefficients in PyTorch operations."""
        return again(self.shard, kept, part)

    def _blocks(self, logits: Tensor) -> Iterator[slice]:
        count, classes = logits.shape
        threads = torch.get_num_threads()
        step = rows_per_block(max(classes, 1), self.shard.dtype.itemsize, logits.device.type, threads)
        for first in range(0, count, step):
            yield slice(first, min(first + step, count))


class _Block:
    """R rows of logits and the C classes of this rank."""

    def __init__(self, shard: Shard, logits: Tensor, rows: slice) -> None:
        self.z, self.rows, self.shard, self.spec = logits, rows, shard, shard.facts.spec
        self.bend = None if shard.facts.bend is None else shard.facts.bend[rows]
        self.outside, self.broken = self._find_outside()
        self.owned: Tensor | None = None
        if shard.local is not None and logits.shape[1]:
            local = shard.local[rows]
            self.owned = ((local >= 0) & (local < logits.shape[1]))[:, None]
            self.place = local.clamp(0, logits.shape[1] - 1)[:, None]

    def fold(self, sums: Slots, target_logits: Tensor | None) -> None:
        """Write the sums of these rows to `sums`."""
        x = self._supported(activate(self._logits(), self.spec, self.bend))
        classes = x.shape[1]
        self._find_place(sums)
        if "target" in sums:
            sums["target"].zero_()
        if self.owned is not None:
            found = self.z.gather(1, self.place)[:, 0] if target_logits is None else target_logits
            sums["target"].copy_(found.masked_fill(~self.owned[:, 0], 0))
            self._put(x, -torch.inf)
        peak = x.amax(-1) if classes else x.new_full(x.shape[:1], -torch.inf)
        sums["peak"].copy_(peak if self.broken is None else peak.masked_fill(self.broken, torch.nan))
        x.sub_(finite(peak)[:, None])
        e = x.exp()
        sums["total"].copy_(row_sum(e))
        if "mixed" in sums:
            sums["mixed"].copy_(row_sum(times(e, x)))
        if "squares" in sums:
            sums["squares"].copy_(row_sum(e.square()))
        self._put(x, 0.0)
        if "deficit" in sums:
            self._write_deficit(x, finite(peak), sums)
        if "below" in sums:
            weight = self.shard.facts.class_weight
            sums["below"].copy_(-row_sum(x if weight is None else times(weight, x)))
        if "cost" in sums:
            given, share = self._shares()
            sums["cost"].copy_(-row_sum(times(share, x)))
            sums["mass"].copy_(row_sum(share))
            if "surprise" in sums:
                sums["surprise"].copy_(-row_sum(times(given, x)))
                sums["given"].copy_(row_sum(given))

    def gradient(self, coefficients: Coefficients, grad: Tensor) -> None:
        """Write the gradient (R, C) with respect to the logits to `grad`."""
        made = coefficients
        x, slopes = activate_with_slope(self._logits(), self.spec, self.bend)
        if not x.shape[1]:
            return
        self._supported(x)
        x.sub_(made.peak[:, None]).sub_(made.log_sum[:, None])
        p = x.exp()
        g = p * made.alpha[:, None]
        if made.beta is not None:
            g.add_(times(p, x * made.beta[:, None]))
        if made.delta is not None:
            weight = self.shard.facts.class_weight
            g.sub_(made.delta[:, None] if weight is None else made.delta[:, None] * weight)
        if made.share is not None:
            given, share = self._shares()
            g.sub_(share.mul_(made.share[:, None]))
            if made.nll is not None:
                g.sub_(given * made.nll[:, None])
        if isinstance(slopes, Tensor) or slopes != 1:
            g.mul_(slopes)
        if self.owned is not None and made.target is not None:
            self._put(g, made.target[:, None])
        if self.outside is not None:
            g.masked_fill_(self.outside, 0)
        if made.zero is not None:
            g.masked_fill_(made.zero[:, None], 0)
        grad.copy_(g)

    def _logits(self) -> Tensor:
        """Return z (R, C) in a new tensor."""
        return self.z.to(self.shard.dtype, copy=True)

    def _supported(self, x: Tensor) -> Tensor:
        """Return x (R, C), with -inf outside of each row's support, in place."""
        return x if self.outside is None else x.masked_fill_(self.outside, -torch.inf)

    def _find_outside(self) -> tuple[Tensor | None, Tensor | None]:
        """Return masks of the classes outside of each row's support (R, C), and of rows with invalid class ids (R,)."""
        support = self.shard.facts.support
        if support is None:
            return None, None
        pairs = support.pairs(self.rows.start, self.rows.stop)
        local = pairs.classes - self.shard.layout.first
        here = (local >= 0) & (local < self.z.shape[1])
        counted = torch.zeros(self.z.shape[0], self.z.shape[1] + 1, dtype=torch.bool, device=self.z.device)
        counted[pairs.rows, torch.where(here, local, self.z.shape[1])] = True
        if pairs.wrong is None:
            return ~counted[:, :-1], None
        return ~counted[:, :-1], pairs.sum(pairs.wrong.to(torch.float32)) > 0

    def _write_deficit(self, x: Tensor, reference: Tensor, sums: Slots) -> None:
        """Write the sum of reference - x over this rank's classes. `x` contains x - reference, and 0 for the target."""
        allowed = None if self.outside is None else ~self.outside
        deficit = -row_sum(x if allowed is None else x.masked_fill(~allowed, 0))
        if self.owned is not None:
            mine = self.owned if allowed is None else self.owned & allowed.gather(1, self.place)
            x_y = activate(sums["target"].clone(), self.spec, self.bend)
            deficit = deficit + torch.where(mine[:, 0], reference - x_y, 0)
        sums["deficit"].copy_(deficit)
        if "allowed" in sums:
            assert allowed is not None
            sums["allowed"].copy_(allowed.sum(-1))

    def _put(self, values: Tensor, other: Tensor | float) -> None:
        """Replace the target's value in rows whose target is on this rank."""
        if self.owned is None:
            return
        present = values.gather(1, self.place)
        values.scatter_(1, self.place, torch.where(self.owned, other, present))

    def _shares(self) -> tuple[Tensor, Tensor]:
        """Return the target probabilities q and the shares w q' of each class in the loss, both (R, C)."""
        facts, spec = self.shard.facts, self.spec
        given = facts.probability_block(self.rows.start, self.rows.stop).to(self.shard.dtype)
        share = given * (1 - spec.label_smoothing) + spec.label_smoothing / facts.vocabulary
        return given, share if facts.class_weight is None else share.mul_(facts.class_weight)

    def _find_place(self, sums: Slots) -> None:
        """Write the largest logit and its class.

        It is taken before scale and softcap, which preserve or reverse the order.
        """
        scale = self.spec.logit_scale
        if "key" in sums:
            sign = (scale > 0) - (scale < 0)
            z = self.z if self.outside is None else self.z.masked_fill(self.outside, -sign * torch.inf)
            self._write_largest(z, sign, sums["key"], sums.integers("place"))
        if "truth" in sums:
            given = self.shard.facts.probability_block(self.rows.start, self.rows.stop)
            self._write_largest(given, 1, sums["likely"], sums.integers("truth"))

    def _write_largest(self, values: Tensor, sign: int, key: Tensor, place: Tensor) -> None:
        """Write the largest of sign * values (R, C) and the first class that has it."""
        if not values.shape[1] or not sign:
            key.fill_(0 if values.shape[1] else -torch.inf)
            place.fill_(self.shard.layout.first)
            return
        found, local = values.max(-1) if sign > 0 else values.min(-1)
        key.copy_(found if sign > 0 else -found)
        place.copy_(local + self.shard.layout.first)


STEPS["torch"] = PlainSteps
