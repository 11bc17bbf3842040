"""The steps of a row in PyTorch's own operations, for every device, in blocks that fit into CPU caches.

For a block of raw logits z, let x, e, w and a be as in `xent.cross_entropy`, r the row's gradient factor, and
W = sum_c w_c. For class probabilities, let q' be the whole smoothed target and W = sum_c w_c q'_c. Then::

    log p = x - lse(x)                                   one fused call, into the memory of the gradient
    l     = a [ (1-e) w_y (-log p_y) + (e/V) sum_c w_c (-log p_c) + zeta lse^2 ]
    dl/dx = r [ ((1-e) w_y + (e/V) W + 2 zeta lse) p - (1-e) w_y [c==y] - (e/V) w_c ]
    dx/dz = s (1 - tanh(s z / k)^2)   with softcap k,   s   without

Upstream gradients u of lse, n of nll and v of the entropy H add u p + n (p - [c==y]) - v p (log p + H) to dl/dx; for
probabilities q the second term is n (p sum_c q_c - q). With a temperature per row, s and k differ by row.

Blocks are small, so that a block is in cache after the first pass over it. On a CPU, rows of many classes without
options of x or label smoothing are computed by `QuickRows` instead.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from xent.backends.torch.exponentials import Exponentials
from xent.backends.torch.facts import Facts
from xent.backends.torch.job import Upstream
from xent.backends.torch.quick_rows import QuickRows, serves
from xent.backends.torch.results import Results
from xent.backends.torch.rows import row_sum
from xent.backends.torch.steps import times
from xent.core.chunks import rows_per_block

__all__ = ["PlainPass"]

_NO_UPSTREAM, _WHOLE = Upstream(), slice(None)


class PlainPass:
    """A `xent.backends.torch.plain_job.RowPass` over the rows of one call."""

    def __init__(self, facts: Facts, results: Results) -> None:
        self.facts = facts
        self.results = results
        self._acc = facts.scale.dtype
        self._scratch: dict[str, Tensor] = {}
        self.exponentials = Exponentials()

    def forward(self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None = None) -> None:
        """Compute a block of rows: see `xent.backends.torch.plain_job.RowPass.forward`."""
        if serves(self.facts):
            self._quick(logits, start, grad, target_logits)
            return
        for block in self._blocks(logits, start, grad, target_logits):
            block.forward()

    def _quick(self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None) -> None:
        rows, results = slice(start, start + len(logits)), self.results
        quick = QuickRows(self.facts, results, self.exponentials, logits, rows, grad, target_logits)
        nll, lse = quick.forward()
        if results.norm is not None:
            results.norm[0, rows], results.norm[1, rows] = quick.norm()
        self.record(rows, nll if quick.share is None else times(quick.share[:, 0], nll), nll, lse)

    def record(self, rows: slice, loss: Tensor, nll: Tensor | None, lse: Tensor | None) -> None:
        """Record the results of these rows, from their losses without row weights and z-loss."""
        facts, results, z_loss = self.facts, self.results, self.facts.spec.z_loss
        weight = None if facts.given_weight is None else facts.given_weight[rows]
        dead = None if facts.dead is None else facts.dead[rows]
        loss = loss if weight is None else weight * loss
        if results.nll is not None:
            assert nll is not None
            results.nll[rows] = nll
        if results.lse is not None:
            assert lse is not None
            results.lse[rows] = lse
        if z_loss or results.z_term is not None:
            assert lse is not None
            z_term = (z_loss if weight is None else weight * z_loss) * lse.square()
            loss = loss + z_term if z_loss else loss
            if results.z_term is not None:
                results.z_term[rows] = z_term if dead is None else z_term.masked_fill(dead, 0)
        loss = loss if dead is None else loss.masked_fill(dead, 0)
        if len(loss) == facts.scale.shape[0]:
            results.found_loss = loss
        else:
            results.loss[rows] = loss

    def backward(self, logits: Tensor, start: int, grad: Tensor) -> None:
        """Write a block's gradient: see `xent.backends.torch.plain_job.RowPass.backward`."""
        for block in self._blocks(logits, start, grad, None):
            block.backward()

    def _blocks(
        self, logits: Tensor, start: int, grad: Tensor | None, target_logits: Tensor | None
    ) -> Iterator["_Block"]:
        count, vocabulary = logits.shape
        step = rows_per_block(vocabulary, self._acc.itemsize, logits.device.type, torch.get_num_threads())
        if count == self.facts.scale.shape[0] and count <= step:
            yield _Block(self, logits, _WHOLE, grad, target_logits)
            return
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            rows = slice(start + part.start, start + part.stop)
            yield _Block(
                self,
                logits[part],
                rows,
                None if grad is None else grad[part],
                None if target_logits is None else target_logits[part],
            )

    def scratch(self, name: str, like: Tensor) -> Tensor:
        """Return a buffer of the block's shape in the accumulation dtype, which is reused for every block."""
        held = self._scratch.get(name)
        if held is None or held.shape[0] < like.shape[0]:
            held = self._scratch[name] = torch.empty(like.shape, dtype=self._acc, device=like.device)
        return held[: like.shape[0]]


class _Block:
    """A block of R rows. `work` holds x, then log p, then p, then the gradient."""

    def __init__(
        self, parent: PlainPass, z: Tensor, rows: slice, grad: Tensor | None, target_logits: Tensor | None
    ) -> None:
        self.parent, self.z, self.rows, self.grad, self.target_logits = parent, z, rows, grad, target_logits
        facts, results = parent.facts, parent.results
        self.facts, self.results, self.spec = facts, results, facts.spec
        self.whole = rows is _WHOLE
        in_grad = grad is not None and grad.dtype == facts.scale.dtype
        self.work: Tensor = grad if in_grad and grad is not None else parent.scratch("work", z)
        self.target = None if facts.target is None else self._of(facts.target)
        self.spread = self.spec.label_smoothing / facts.vocabulary
        self.scale: Any = self.spec.logit_scale
        self.cap: Any = self.spec.softcap
        if facts.bend is not None:
            self.scale, cap = self._of(facts.bend).unbind(1)
            self.scale, self.cap = self.scale[:, None], None if self.cap is None else cap[:, None]
        self.upstream = _NO_UPSTREAM
        if facts.upstream is not None and grad is not None:
            self.upstream = Upstream(*(None if one is None else self._of(one) for one in facts.upstream))
        self.one_minus_tanh2: Tensor | None = None
        self.log_p: Tensor | None = None

    def _of(self, values: Tensor) -> Tensor:
        """Return the block's slice of values (N, ...) per row of the call."""
        return values if self.whole else values[self.rows]

    def _record(self, place: Tensor | None, values: Tensor) -> None:
        """Write the block's values to its slice of a result, unless the result is None (not requested)."""
        if place is not None:
            self._of(place).copy_(values)

    def forward(self) -> None:
        """Record losses and statistics, then write the gradient if it is needed."""
        x, results = self._activations(), self.results
        needs_lse = self.spec.z_loss != 0 or results.norm is not None or results.lse is not None
        peak = x.amax(-1) if needs_lse or results.z_term is not None else None
        if results.mean_logit is not None:
            self._record(results.mean_logit, row_sum(x) / x.shape[1])
        self._log_softmax(x)
        lse = None
        if peak is not None:
            log_sum = -self.work.amax(-1)
            lse = torch.where(peak == -torch.inf, peak, peak + log_sum)
            if results.norm is not None:
                self._record(results.norm[0], peak)
                self._record(results.norm[1], log_sum)
        share, total = self._losses(lse)
        wants_entropy, entropy = results.entropy is not None or self.upstream.entropy is not None, None
        if self.grad is not None or wants_entropy or results.log_sum_sq_probs is not None:
            self._exponentiate(wants_entropy)
        if results.log_sum_sq_probs is not None:
            self._record(results.log_sum_sq_probs, row_sum(self.work.square()).log())
        if self.log_p is not None:
            # log(p) of a rounded p near 1 would have an error larger than the entropy itself, so log p is kept.
            entropy = 0 - row_sum(self.work * self.log_p)
            self._record(results.entropy, entropy)
        if self.grad is not None:
            self._gradient(share, total, lse, entropy)

    def backward(self) -> None:
        """Write the gradient from the recorded norm."""
        x, norm = self._activations(), self.results.norm
        assert norm is not None
        peak, log_sum = self._of(norm[0]), self._of(norm[1])
        torch.sub(x, peak[:, None], out=self.work).sub_(log_sum[:, None])
        self._exponentiate(self.upstream.entropy is not None)
        share, total = self._shares()
        entropy = self.results.entropy
        self._gradient(share, total, peak + log_sum, None if entropy is None else self._of(entropy))

    def _activations(self) -> Tensor:
        """Return x (R, V), in `work` unless it equals the raw logits. Store the softcap's slope if needed later."""
        scaled = self.facts.bend is not None or self.spec.logit_scale != 1
        plain = self.cap is None and not scaled
        if self.z.dtype == self.work.dtype and plain:
            x = self.z
        else:
            x = self.work if self.work is self.z else self.work.copy_(self.z)
        self._predict(x)
        if x is self.work:
            if self.target_logits is not None and self.target is not None:
                x.scatter_(1, self.target[:, None], self.target_logits[:, None])
            if scaled:
                x.mul_(self.scale)
        if self.cap is not None:
            x.div_(self.cap).tanh_()
            if self.grad is not None:
                slope = torch.mul(x, x, out=self.parent.scratch("slope", self.z))
                self.one_minus_tanh2 = slope.neg_().add_(1)
            x.mul_(self.cap)
        return x

    def _log_softmax(self, x: Tensor) -> None:
        """Overwrite `work` with log p."""
        if x.is_cpu:
            torch.log_softmax(x, -1, out=self.work)
            return
        torch.sub(x, x.amax(-1, keepdim=True), out=self.work)
        powers = torch.exp(self.work, out=self.parent.scratch("powers", self.z))
        self.work.sub_(row_sum(powers).log()[:, None])

    def _exponentiate(self, keeps: bool) -> None:
        """Overwrite log p in `work` with p; keep log p if the entropy or its gradient needs it."""
        if keeps:
            # log p is clamped because 0 times infinity would be NaN; p underflows to 0 far above log p = -1000.
            self.log_p = torch.clamp(self.work, min=-1000, out=self.parent.scratch("log_p", self.z))
        self.parent.exponentials(self.work, self.work)

    def _predict(self, z: Tensor) -> None:
        """Record the class of the largest x, from raw logits: scale and softcap keep their order or reverse it."""
        predictions, scale = self.results.predictions, self.spec.logit_scale
        if predictions is None:
            return
        if math.isnan(scale):  # the scale is a tensor, whose value is not read here
            sign = self.scale[:, 0]
            highest = torch.where(sign > 0, z.argmax(-1), torch.where(sign < 0, z.argmin(-1), 0))
        else:
            highest = z.argmax(-1) if scale >= 0 else z.argmin(-1)
        self._record(predictions, torch.zeros_like(highest) if scale == 0 else highest)

    def _shares(self) -> tuple[Any, Any]:
        """Return (share of the target, sum of shares). A share is the factor of -log p_c in the loss.

        For class indices, the share of the target is (1-e) w_y, (R, 1), or a number without class weights. It does not
        include the smoothing term (e/V) w_c, but the sum does. For class probabilities the shares are w_c q'_c, (R, V).
        The sum is (R, 1) or a number.
        """
        facts, keep = self.facts, 1 - self.spec.label_smoothing
        if self.target is None:
            share = self.parent.scratch("share", self.z)
            share.copy_(self._probabilities())
            if self.spread:
                share.mul_(keep).add_(self.spread)
            if facts.class_weight is not None:
                share.mul_(facts.class_weight)
            return share, row_sum(share)[:, None]
        each: Any = keep if facts.class_weight is None else keep * facts.class_weight[self.target[:, None]]
        return each, each + self.spread * facts.class_weight_total

    def _probabilities(self) -> Tensor:
        """Return the target probabilities of the block's rows, (R, V), in the caller's dtype."""
        start = 0 if self.whole else self.rows.start
        return self.facts.probability_block(start, start + self.z.shape[0])

    def _losses(self, lse: Tensor | None) -> tuple[Any, Any]:
        """Record the losses, from log p in `work`; return the shares."""
        facts, results = self.facts, self.results
        log_p = self.work
        share, total = self._shares()
        if self.target is None:
            loss, nll = -row_sum(times(share, log_p)), None
            if results.nll is not None:
                nll = -row_sum(times(self._probabilities().to(log_p.dtype), log_p))
        else:
            nll = nll_loss(log_p, self.target, reduction="none")
            if isinstance(share, Tensor):
                loss = times(share[:, 0], nll)
            else:
                loss = nll if share == 1 else nll * share if share else torch.zeros_like(nll)
            if self.spread:
                spread_over = log_p if facts.class_weight is None else times(facts.class_weight, log_p)
                loss = loss - self.spread * row_sum(spread_over)
        self.parent.record(self.rows, loss, nll, lse)
        return share, total

    def _gradient(self, share: Any, total: Any, lse: Tensor | None, entropy: Tensor | None) -> None:
        """Turn p in `work` into the gradient with respect to z, and write it to `grad`."""
        facts, spec, grad, work = self.facts, self.spec, self.grad, self.work
        assert grad is not None
        scale = self._of(facts.scale).unsqueeze(1)
        if not isinstance(self.scale, float) or self.scale != 1:
            scale = scale * self.scale
        if spec.z_loss:
            assert lse is not None
            total = total + 2 * spec.z_loss * lse[:, None]
        of_nll = None if self.upstream.nll is None else self.upstream.nll[:, None] * self.scale
        raw = mixed = None
        if of_nll is not None and self.target is None:
            raw = self._probabilities().to(work.dtype)
            mixed = of_nll * row_sum(raw)[:, None]
        self._multiply(_scaled(scale, total), of_nll if mixed is None else mixed, entropy)
        if self.target is None:
            work.sub_(share.mul_(scale))
            if raw is not None and of_nll is not None:
                work.sub_(raw * of_nll)
        else:
            of_target = -_scaled(scale, share)
            work.scatter_add_(1, self.target.unsqueeze(1), of_target if of_nll is None else of_target - of_nll)
            if self.spread:
                each = scale * self.spread
                work.sub_(each if facts.class_weight is None else each * facts.class_weight)
        if self.one_minus_tanh2 is not None:
            work.mul_(self.one_minus_tanh2)
        if facts.dead is not None:
            work.masked_fill_(self._of(facts.dead)[:, None], 0)
        if work is not grad:
            grad.copy_(work)

    def _multiply(self, alpha: Tensor, of_nll: Tensor | None, entropy: Tensor | None) -> None:
        """Multiply p in `work` by alpha + beta log p, with the statistics' gradients in both coefficients (R, 1)."""
        given = self.upstream
        if of_nll is not None:
            alpha = alpha + of_nll
        if given.lse is not None:
            alpha = alpha + given.lse[:, None] * self.scale
        if given.entropy is not None:
            assert entropy is not None
            assert self.log_p is not None
            of_entropy = given.entropy[:, None] * self.scale
            self.work.mul_(self.log_p.add_(entropy[:, None]).mul_(-of_entropy).add_(alpha))
        else:
            self.work.mul_(alpha)


def _scaled(scale: Tensor, share: Any) -> Tensor:
    """Return scale * share; the scale itself if the share is the number 1."""
    return scale if not isinstance(share, Tensor) and share == 1 else scale * share
