"""Rows with a support (the classes that a sampler allowed), in MLX's own operations.

The logits (M,) of the support's entries, called picks, are gathered from the logits chunk by chunk. Sums over the
vocabulary are sums over a row's entries; `finish` computes results from them as usual. The gradient of all other logits
is 0. If the target is not among its row's entries, the loss is inf and has no gradient. Targets are class indices, and
there is no label smoothing.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from xent.backends.mlx.elementwise import activate, exp, expm1
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.finish import Gap, Sums, coefficients, finish, product
from xent.backends.mlx.kernels import Asked, Found, RowFacts
from xent.backends.mlx.support import Entries

__all__ = ["Source", "Supported"]


class Source(Protocol):
    """The rows of a call: access to its logits at the entries of a support."""

    def pick(self, entries: Entries) -> mx.array:
        """Return the raw logits (M,) of the entries; arbitrary values for entries that belong to no row."""

    def spread(self, values: mx.array, facts: Facts, needs: Collection[str]) -> dict[str, mx.array]:
        """Return the gradients that `needs` names, from those of the picks (M,), which are 0 for entries of no row."""


class Supported:
    """The rows of a call whose facts have a support."""

    def __init__(self, source: Source, facts: Facts) -> None:
        assert facts.support is not None
        self._source, self._facts, self._entries = source, facts, facts.support
        self._picks = source.pick(self._entries)

    def forward(self, needs: Collection[str]) -> tuple[Found, dict[str, mx.array]]:
        """Return the results of all rows. `backward` computes gradients; it does not need the logits again."""
        asked = Asked.of(self._facts.spec.stats, grad=False)
        found = finish(self._fold(asked), self._facts.rows, asked)
        if found.mean_logit is not None:
            empty = (self._entries.count == 0) & ~self._entries.wrong
            found = replace(found, mean_logit=mx.where(empty, 0, found.mean_logit))
        return found, {}

    def backward(self, facts: Facts, found: Found, needs: Collection[str]) -> dict[str, mx.array]:
        """Return the gradients that `needs` names."""
        assert found.norm is not None
        return self._source.spread(self._gradient(facts.rows, found.norm), facts, needs)

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

    def _gradient(self, rows: RowFacts, norm: mx.array) -> mx.array:
        """Return the gradient with respect to the picks (M,)."""
        entries, (peak, below, slope) = self._entries, self._relative(rows)
        log_sum, member = norm[:, 1], self._members()
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
            x, slope = activate(z, rows, entries.of)
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
