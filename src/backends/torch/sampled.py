"""The steps of a row with a support (the classes that a sampler allowed), in PyTorch's own operations.

They are like those of `plain`, with sums over the row's support: the logits of these classes are gathered, and all
further arrays have one entry per (row, class) pair. They are float64, so that sequential sums lose no precision.
"""

import math
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts
from xent.backends.torch.results import Results
from xent.backends.torch.support import Pairs, Support

__all__ = ["SupportPass"]

_PAIRS = 2**18  # per block, so that its arrays fit into CPU caches


class SupportPass:
    """A `xent.backends.torch.plain_job.RowPass` over rows with a support and class indices as targets."""

    def __init__(self, facts: Facts, results: Results) -> None:
        assert facts.support is not None
        assert facts.target is not None
        self._facts, self._results = facts, results
        self._support: Support = facts.support
        # One block on a GPU, because the host waits for the number of pairs of each block.
        self._step = max(len(facts.scale), 1)
        if facts.scale.device.type == "cpu":
            self._step = max(_PAIRS * len(facts.scale) // max(len(facts.support.ids), 1), 1)

    def forward(self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None = None) -> None:
        """Compute a block of rows: see `xent.backends.torch.plain_job.RowPass.forward`."""
        self._take(logits, start, grad, target_logits, True)

    def backward(self, logits: Tensor, start: int, grad: Tensor) -> None:
        """Write a block's gradient; compute the log-sum-exp again."""
        self._take(logits, start, grad, None, False)

    def _take(
        self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None, records: bool
    ) -> None:
        for first in range(0, len(logits), self._step):
            part = slice(first, min(first + self._step, len(logits)))
            rows = slice(start + part.start, start + part.stop)
            block = _Block(
                self._facts,
                rows,
                self._support.pairs(rows.start, rows.stop),
                logits[part],
                None if target_logits is None else target_logits[part],
            )
            if records:
                block.record(self._results)
            if grad is not None:
                block.write_gradient(grad[part])


class _Block:
    """R rows and their P pairs; floats are float64."""

    def __init__(self, facts: Facts, rows: slice, pairs: Pairs, logits: Tensor, target_logits: Tensor | None) -> None:
        self._facts, self._rows, self._pairs = facts, rows, pairs
        self._home = pairs.rows.device
        target = self._of_rows(facts.target)
        self._is_target = pairs.classes == pairs.each_row(target)
        z = self._wide(logits[pairs.rows, pairs.classes])
        if target_logits is not None:
            z = torch.where(self._is_target, pairs.each_row(self._wide(target_logits)), z)
        self._z = z if pairs.wrong is None else z.masked_fill(pairs.wrong, torch.nan)
        x, self._slope = self._activations()
        self._peak = pairs.largest(x)
        safe = torch.where(self._peak == -torch.inf, 0, self._peak)
        self._log_sum = pairs.sum((x - pairs.each_row(safe)).exp()).log()
        self._lse = safe + self._log_sum
        log_p = x - pairs.each_row(self._lse)
        self._p = log_p.exp()
        # log p is clamped because 0 times infinity would be NaN; p underflows to 0 far above log p = -1000.
        self._log_p = log_p.clamp(min=-1000)
        self._x = x
        has_target = pairs.sum(self._is_target.to(x.dtype)) > 0
        found = pairs.sum(torch.where(self._is_target, -log_p, 0))
        self._nll = torch.where(has_target, found, torch.inf)
        self._entropy = 0 - pairs.sum(self._p * self._log_p)

    def _wide(self, values: Tensor) -> Tensor:
        return values.to(self._home, torch.float64)

    def _of_rows(self, values: Any) -> Tensor:
        taken: Tensor = values[self._rows].to(self._home)
        return taken

    def _activations(self) -> tuple[Tensor, Any]:
        """Return x of each pair, and dx/dz."""
        facts, spec = self._facts, self._facts.spec
        scale: Any = spec.logit_scale
        cap: Any = spec.softcap
        if facts.bend is not None:
            scale, caps = (self._pairs.each_row(self._wide(one)) for one in self._of_rows(facts.bend).unbind(1))
            cap = None if cap is None else caps
        x = self._z * scale
        if cap is None:
            return x, scale
        tanh = (x / cap).tanh()
        return tanh * cap, scale * (1 - tanh.square())

    def record(self, results: Results) -> None:
        """Record losses, statistics and norm."""
        facts, pairs, rows, spec = self._facts, self._pairs, self._rows, self._facts.spec
        weight = self._wide(facts.weight[rows])
        z_term = weight * spec.z_loss * self._lse.square()
        share = self._share()
        loss = weight * (share * self._nll).masked_fill(share == 0, 0)
        count = pairs.offsets.diff().clamp(min=1)
        found = {
            "loss": self._alive(loss + z_term if spec.z_loss else loss),
            "z_term": self._alive(z_term),
            "lse": self._lse,
            "nll": self._nll,
            "entropy": self._entropy,
            "log_sum_sq_probs": pairs.sum(self._p.square()).log(),
            "mean_logit": pairs.sum(self._x) / count,
        }
        if results.predictions is not None:
            found["predictions"] = self._predictions()
        results.record(rows, found)
        if results.norm is not None:
            results.norm[0, rows] = self._peak.to(results.norm)
            results.norm[1, rows] = self._log_sum.to(results.norm)

    def _share(self) -> Tensor:
        """Return w_y of each row."""
        facts = self._facts
        if facts.class_weight is None:
            return torch.ones_like(self._lse)
        assert facts.target is not None
        return self._wide(facts.class_weight[facts.target[self._rows]])

    def _alive(self, values: Tensor) -> Tensor:
        dead = self._facts.dead
        return values if dead is None else values.masked_fill(self._of_rows(dead), 0)

    def _predictions(self) -> Tensor:
        """Return the class of the largest x, found from raw logits; 0 if there is none above -inf."""
        pairs, scale = self._pairs, self._facts.spec.logit_scale
        if math.isnan(scale):  # the scale is a tensor, whose value is not read here
            sign = pairs.each_row(self._wide(self._of_rows(self._facts.bend)[:, 0])).sign()
            values = torch.where(sign == 0, 0, sign * self._z)
        else:
            values = self._z if scale > 0 else -self._z if scale < 0 else torch.zeros_like(self._z)
        largest = pairs.largest(values)
        # Among equal logits choose the lowest class: the largest after negation.
        lowest = torch.where(values == pairs.each_row(largest), -pairs.classes.to(values.dtype), -torch.inf)
        found = -pairs.largest(lowest)
        return torch.where(largest.isfinite() & found.isfinite(), found, 0).to(torch.int64)

    def write_gradient(self, grad: Tensor) -> None:
        """Write the gradient with respect to z, 0 for all other classes, to (R, V) `grad`."""
        facts, pairs, rows, upstream = self._facts, self._pairs, self._rows, self._facts.upstream
        is_out = self._nll == torch.inf  # the target is not in the support: no gradient
        scale, share = self._wide(facts.scale[rows]).masked_fill(is_out, 0), self._share()
        gamma = scale * share
        alpha = gamma + (2 * facts.spec.z_loss * scale * self._lse if facts.spec.z_loss else 0)
        factor: Any = 0
        if upstream is not None:
            if upstream.nll is not None:
                of_nll = self._wide(upstream.nll[rows]).masked_fill(is_out, 0)
                alpha, gamma = alpha + of_nll, gamma + of_nll
            if upstream.lse is not None:
                alpha = alpha + self._wide(upstream.lse[rows])
            if upstream.entropy is not None:
                of_entropy = self._wide(upstream.entropy[rows])
                above = self._log_p + pairs.each_row(self._entropy)
                factor = -pairs.each_row(of_entropy) * above
        made = self._p * (pairs.each_row(alpha) + factor) - torch.where(self._is_target, pairs.each_row(gamma), 0)
        made = made * self._slope
        if facts.dead is not None:
            made = made.masked_fill(pairs.each_row(self._of_rows(facts.dead)), 0)
        grad.zero_()
        grad[pairs.rows.to(grad.device), pairs.classes.to(grad.device)] = made.to(grad.device, grad.dtype)
        if facts.invalid is not None:
            grad.masked_fill_(facts.invalid[rows, None], torch.nan)
