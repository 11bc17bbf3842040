"""Rows with a support (the classes that a sampler allowed), in MLX's own operations.

The logits (M,) of the support's entries, called picks, are gathered from the logits chunk by chunk. Sums over the
vocabulary are sums over a row's entries; `finish` computes results from them as usual. The gradient of all other logits
is 0. If the target is not among its row's entries, the loss is inf and has no gradient. Targets are class indices, and
there is no label smoothing.
"""

from dataclasses import replace

import mlx.core as mx

from xent.backends.mlx.elementwise import exp, expm1
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.finish import Gap, Sums, coefficients, finish, product
from xent.backends.mlx.kernels import Asked, Found, RowFacts
from xent.backends.mlx.loop import Step
from xent.backends.mlx.sources import Loaded

__all__ = ["Supported"]


class Supported:
    """The steps of log-probabilities with supports: see `xent.backends.mlx.steps.Steps`."""

    def __init__(self, facts: Facts) -> None:
        assert facts.support is not None
        self._facts, self._entries = facts, facts.support
        self._picks = mx.zeros(self._entries.ids.shape, facts.rows.weight.dtype)
        self._log_sum = mx.zeros((0,))

    def forward(self, wanted: bool) -> Step:
        """Return the step that picks logits. `backward` computes gradients."""
        entries = self._entries

        def step(loaded: Loaded, part: slice) -> tuple[list[mx.array], mx.array | None]:
            inside, row = entries.within(part)
            picked = loaded.logits[row, entries.ids].astype(self._picks.dtype)
            self._picks = mx.where(inside, picked, self._picks)
            return [self._picks], None

        return step

    def found(self) -> Found:
        """Return the results of all rows."""
        asked = Asked.of(self._facts.call.options.stats, grad=False)
        sums = self._fold(asked)
        found, self._log_sum = finish(sums, self._facts.rows, asked), sums.log_sum
        if found.mean_logit is not None:
            empty = (self._entries.count == 0) & ~self._entries.wrong
            found = replace(found, mean_logit=mx.where(empty, 0, found.mean_logit))
        return found

    def backward(self, facts: Facts) -> tuple[Step, list[mx.array]]:
        """Return the step that places the gradients of the picks, which needs no logits."""
        entries, values = self._entries, self._gradient(facts.rows, self._log_sum)
        assert facts.invalid is not None
        invalid = facts.invalid

        def step(loaded: Loaded, part: slice) -> tuple[list[mx.array], mx.array | None]:
            inside, row = entries.within(part)
            # Computed after the part before, as the rows are.
            some = mx.depends(values.astype(loaded.rows.dtype), [loaded.rows])
            nothing = mx.where(invalid[part, None], mx.nan, 0).astype(some.dtype)
            grad = mx.broadcast_to(nothing, (part.stop - part.start, facts.vocabulary))
            return [], grad.at[row, entries.ids].add(mx.where(inside, some, 0))

        return step, [values]

    def _fold(self, asked: Asked) -> Sums:
        """Return the sums of each row over its entries."""
        entries, (peak, below, _) = self._entries, self._relative(self._facts.rows)
        hit, member, empty = self._hits(), self._members(), entries.count == 0
        powers = exp(-below)
        parts = [mx.where(hit, 0, powers), mx.where(hit, below, 0), product(powers, below), mx.square(powers), below]
        rest, below_y, mixed, squares, level = entries.sums(mx.stack(parts))
        power_y = mx.where(member, exp(-below_y), 0)
        total = rest + power_y
        log_sum = mx.log(total)
        if below.dtype != mx.float64:
            log_sum = mx.where(power_y == 1, mx.log1p(rest), log_sum)  # 1 + rest would be rounded to 1

        def filled(values: mx.array) -> mx.array:
            return mx.where(entries.wrong, mx.nan, mx.where(empty, 0, values))

        return Sums(
            peak=mx.where(entries.wrong, mx.nan, peak),
            log_sum=filled(log_sum),
            target=Gap(mx.where(member, below_y, mx.inf)),
            expected=filled(mixed / total) if asked.entropy else None,
            best=self._best() if asked.predictions else None,
            squares=filled(squares / mx.square(total)) if asked.log_sum_sq_probs else None,
            level=Gap(level, entries.count) if asked.mean_logit else None,
        )

    def _gradient(self, rows: RowFacts, log_sum: mx.array) -> mx.array:
        """Return the gradient with respect to the picks (M,)."""
        entries, (peak, below, slope) = self._entries, self._relative(rows)
        member = self._members()
        upstream = dict(rows.upstream)
        if "nll" in upstream:
            upstream["nll"] = mx.where(member, upstream["nll"], 0)
        rows = replace(rows, scale=mx.where(member, rows.scale, 0), upstream=upstream)
        given = coefficients(rows, peak + log_sum, 1)
        log_p = -(below + entries.of(log_sum))
        p = exp(log_p)
        at_target = entries.of(given.gamma) * expm1(log_p)
        if given.rest is not None:
            at_target = at_target + product(entries.of(given.rest), p)
        made = mx.where(self._hits(), at_target, product(p, entries.of(given.alpha)))
        if given.beta is not None:
            made = made + product(p, entries.of(given.beta) * log_p)
        if slope is not None:
            made = made * slope
        return mx.where(entries.owned & ~entries.of(rows.dead), made, 0)

    def _relative(self, rows: RowFacts) -> tuple[mx.array, mx.array, mx.array | None]:
        """Return the largest x (N,), the difference (M,) of each x to it, and the softcap's slope (M,) or None."""
        entries, z = self._entries, self._picks.astype(rows.weight.dtype)
        if rows.terms.softcap:
            x, slope = rows.activate(z, entries.of)
            peak = entries.largest(x)
            return peak, entries.of(peak) - x, slope
        key = self._key().astype(z.dtype)
        best = entries.largest(key)
        below = entries.of(best) - key
        if not rows.terms.scale:
            return best, below, None
        # Subtract raw logits first: a difference is rounded once, also for logits far from 0.
        size = mx.abs(rows.of_rows("logit_scale"))
        return size * best, below * (entries.of(size) if size.ndim else size), None

    def _hits(self) -> mx.array:
        """Return the mask (M,) of the entries that are the target of their row."""
        target = self._facts.rows.target
        assert target is not None
        return self._entries.owned & (self._entries.ids == self._entries.of(target))

    def _members(self) -> mx.array:
        """Return the mask (N,) of the rows whose target is among their entries."""
        return self._entries.largest(self._hits().astype(mx.float32)) > 0

    def _key(self) -> mx.array:
        """Return the picks (M,), negated if the logit scale is negative, so that they have the order of x."""
        if not self._facts.rows.terms.scale:
            return self._picks
        return mx.sign(self._facts.rows.number("logit_scale")).astype(self._picks.dtype) * self._picks

    def _best(self) -> tuple[mx.array, mx.array]:
        """Return the largest logit before the softcap and its class, the lowest among equals; 0 for empty rows."""
        entries, key = self._entries, self._key()
        key = mx.where(mx.isnan(key), mx.inf, key)
        best = entries.largest(key)
        chosen = entries.lowest(mx.where(key == entries.of(best), entries.ids, mx.iinfo(mx.int32).max))
        return best, mx.where(entries.count == 0, 0, chosen)
