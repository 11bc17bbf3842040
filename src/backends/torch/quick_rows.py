"""Rows of many classes on a CPU, with one exponential per logit and without a pass for the largest one.

With a reference R near the row's largest logit, target y, row factor r and class weight w_y::

    e_c = exp(x_c - R)        s = sum_c e_c        lse = R + log s        -log p_y = log(s exp(R - x_y))
    dl/dx_c = r (w_y + 2 zeta lse) e_c / s      dl/dx_y = r (w_y (p_y - 1) + 2 zeta lse p_y)

R is 0 if the largest of the row's first logits is near 0: then nothing is subtracted or rounded. Otherwise R is that
logit. Where s shows that a row has logits far above R, the row is computed again relative to its largest logit. All
this depends on the row alone, not on the rows beside it.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.exponentials import Exponentials
from xent.backends.torch.facts import Facts
from xent.backends.torch.results import Results
from xent.backends.torch.rows import row_sum
from xent.core.chunks import rows_per_block

__all__ = ["LEAST_CLASSES", "QuickRows", "serves"]

LEAST_CLASSES = 4096  # with fewer, the time of operations per row exceeds that of exponentials
_FIRST = 64  # classes whose largest logit becomes the reference
_NEAR = 32  # references of a smaller magnitude become 0
_LARGEST_SUM = 2.0**30  # so x is at most 21 above R, and the rounding of x - R at most 1e-6
_LARGEST_EXACT_SUM = 2.0**60  # for R = 0, where nothing is rounded


def serves(facts: Facts) -> bool:
    """Return whether `QuickRows` computes the rows of a call.

    This does not depend on the statistics: a loss has the same bits with and without them.
    """
    spec = facts.spec
    return (
        facts.vocabulary >= LEAST_CLASSES
        and facts.scale.is_cpu
        and facts.target is not None
        and facts.upstream is None
        and spec.softcap is None
        and spec.logit_scale == 1
        and not spec.label_smoothing
        and facts.bend is None
    )


class QuickRows:
    """One pass over these rows of a call, from their logits (R, V)."""

    def __init__(
        self,
        facts: Facts,
        results: Results,
        exponentials: Exponentials,
        logits: Tensor,
        rows: slice,
        grad: Tensor | None,
        target_logits: Tensor | None,
    ) -> None:
        """`target_logits` (R,) replace the targets' logits if these were rounded to 16 bits."""
        assert facts.target is not None
        self.facts, self.results, self.logits, self.grad = facts, results, logits, grad
        self._rows, self._exponentials = rows, exponentials
        self.target, self.scale = facts.target[rows, None], facts.scale[rows, None]
        self.dead = None if facts.dead is None else facts.dead[rows, None]
        self.share = None if facts.class_weight is None else facts.class_weight[self.target]
        self._rounded = logits.dtype != self.scale.dtype
        self._target_logits = logits.gather(1, self.target).to(self.scale.dtype)
        if self._rounded and target_logits is not None:
            self._target_logits = target_logits[:, None]
        highest = logits[:, :_FIRST].amax(-1, keepdim=True).to(self.scale.dtype)
        self._reference = highest.where(highest.abs() >= _NEAR, 0)
        self._moved = bool(self._reference.any())
        self._sums = torch.empty_like(self._reference)
        # Half of the usual block: logits and e are in the cache together.
        self._step = rows_per_block(logits.shape[1], 2 * self.scale.itemsize, "cpu", torch.get_num_threads())

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return -log p_y and lse, (R,) each, and write the gradient if there is memory for it."""
        count = len(self.logits)
        powers = self.logits.new_empty((min(self._step, count), self.logits.shape[1]), dtype=self.scale.dtype)
        found, start = self.results, 0
        statistics = any(each is not None for each in (found.entropy, found.log_sum_sq_probs, found.mean_logit))
        together = statistics or self.grad is not None
        for logits, sums in zip(self.logits.split(self._step), self._sums.split(self._step), strict=True):
            part, block = slice(start, start + len(logits)), powers[: len(logits)]
            self._exponentiate(part, logits, block, sums)
            if together:
                self._mend(part, block)
            if found.predictions is not None:
                self._of(found.predictions, part).copy_(logits.argmax(-1))
            if statistics:
                self._statistics(part, block)
            if self.grad is not None:
                self._gradient(part, block, self.grad[part])
            start = part.stop
        if not together:
            self._mend(slice(0, count), None)
        nll, lse = self._nll(), self._lse(slice(None))
        if self.grad is not None:
            self._target_gradient(nll[:, None], lse)
        return nll, lse[:, 0]

    def norm(self) -> tuple[Tensor, Tensor]:
        """Return lse in two parts: see `Results.norm`."""
        lse, rest = self._split(slice(None))
        return lse[:, 0], rest[:, 0]

    def _exponentiate(self, part: slice, logits: Tensor, powers: Tensor, sums: Tensor) -> None:
        """Write e of these rows to `powers`, and its sums."""
        if self._rounded:
            logits = powers.copy_(logits).scatter_(1, self.target[part], self._target_logits[part])
        if self._moved:
            logits = torch.sub(logits, self._reference[part], out=powers)
        self._exponentials(logits, powers)
        if len(powers) > 1:
            torch.sum(powers, -1, keepdim=True, out=sums)
        else:
            sums[:, 0] = row_sum(powers)

    def _mend(self, part: slice, powers: Tensor | None) -> None:
        """Compute sums, and e if it is given, again where the reference is too far from the row's largest logit."""
        sums = self._sums[part]
        smallest, largest = sums.aminmax()
        if smallest > 0 and largest < _LARGEST_SUM:
            return
        limit = torch.where(self._reference[part] == 0, _LARGEST_EXACT_SUM, _LARGEST_SUM)
        far = ((sums > 0) & (sums < limit)).logical_not_()[:, 0].nonzero()[:, 0]
        for some in far.split(self._step) if len(far) else ():
            rows = some + part.start
            x = self._activations(rows)
            peak = x.amax(-1, keepdim=True)
            # Rows of -inf have the sum 0. An infinite or NaN logit makes a row's results NaN.
            self._reference[rows] = peak = peak.where(peak != -torch.inf, 0)
            x.sub_(peak).exp_()
            self._sums[rows] = row_sum(x)[:, None]
            if powers is not None:
                powers[some] = x

    def _activations(self, rows: Any) -> Tensor:
        """Return x of some rows in the accumulation dtype. It may be the logits themselves if `rows` is a slice."""
        x = self.logits[rows].to(self.scale.dtype)
        return x.scatter_(1, self.target[rows], self._target_logits[rows]) if self._rounded else x

    def _of(self, values: Tensor, part: slice) -> Tensor:
        """Return a block's slice of results of all rows of the call."""
        return values[self._rows.start + part.start : self._rows.start + part.stop]

    def _statistics(self, part: slice, powers: Tensor) -> None:
        """Record the statistics that need all classes."""
        x, results, sums = self._activations(part), self.results, self._sums[part]
        if results.mean_logit is not None:
            self._of(results.mean_logit, part).copy_(row_sum(x) / x.shape[1])
        if results.log_sum_sq_probs is not None:
            self._of(results.log_sum_sq_probs, part).copy_(row_sum((powers / sums).square_()).log())
        if results.entropy is not None:
            lse, rest = self._split(part)
            # 0 times infinity would be NaN; p underflows to 0 far above log p = -1000.
            log_p = (x - lse).sub_(rest).clamp_(min=-1000)
            self._of(results.entropy, part).copy_(0 - row_sum(log_p.mul_(powers)) / sums[:, 0])

    def _lse(self, part: slice) -> Tensor:
        return self._reference[part] + self._sums[part].log()

    def _nll(self) -> Tensor:
        """Return -log p_y, (R,). It is not a view, because PyTorch forbids writing to views that a Function returns."""
        distance, sums = (self._reference - self._target_logits)[:, 0], self._sums[:, 0]
        inverse = sums * distance.exp()
        # 1 / p_y is exact near 1, where a difference of logarithms is not. It may overflow where p_y is tiny.
        return torch.where(inverse.isfinite(), inverse.clamp(min=1).log(), sums.log() + distance)

    def _split(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return lse and what its rounding has taken away, (R, 1) each."""
        lse = self._lse(part)
        return lse, (self._sums[part] * (self._reference[part] - lse).exp()).log()

    def _gradient(self, part: slice, powers: Tensor, grad: Tensor) -> None:
        """Write the gradient of these rows, but for their targets."""
        factor = self._alpha(self._lse(part) if self.facts.spec.z_loss else None, part) / self._sums[part]
        if grad.dtype == powers.dtype:
            torch.mul(powers, factor, out=grad)
        else:
            grad.copy_(powers.mul_(factor))
        if self.dead is not None:
            grad.masked_fill_(self.dead[part], 0)

    def _alpha(self, lse: Tensor | None, part: slice) -> Tensor:
        """Return the gradient's factor of p, r (w_y + 2 zeta lse), (R, 1)."""
        scale, share = self.scale[part], None if self.share is None else self.share[part]
        if lse is None:
            return scale if share is None else scale * share
        return scale * ((1 if share is None else share) + 2 * self.facts.spec.z_loss * lse)

    def _target_gradient(self, nll: Tensor, lse: Tensor) -> None:
        """Write the gradients of the targets' logits."""
        assert self.grad is not None
        spec = self.facts.spec
        value = torch.expm1(-nll) if self.share is None else self.share * torch.expm1(-nll)
        if spec.z_loss:
            value = value + 2 * spec.z_loss * lse * (-nll).exp()
        value = value * self.scale
        if self.dead is not None:
            value = value.masked_fill(self.dead, 0)
        # `scatter_` would make a float32 copy of a 16-bit gradient.
        self.grad[torch.arange(len(value)), self.target[:, 0]] = value[:, 0].to(self.grad.dtype)
