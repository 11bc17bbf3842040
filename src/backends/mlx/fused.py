"""A block of rows with class indices on a GPU, on `mlx.core.fast.cross_entropy`.

With b the loss it returns, lse - x_y, and its gradient c (p - [c==y]) for the upstream gradient c of b, in the notation
of `block`::

    lse   = b + x_y
    dl/dx = c (p - [c==y]) + (c - r (1-e) w_y) [c==y] - r (e/V) w_c,   c = r ((1-e) w_y + (e/V) W + 2 zeta lse)

Where the target's logit was rounded and is known better, b and the target's p are corrected for it.
"""

import mlx.core as mx

from xent.backends.mlx.block import Block, product
from xent.backends.mlx.devices import has_fused_loss
from xent.backends.mlx.kernels import Asked, Found, RowFacts

__all__ = ["FusedBlock", "fuses", "needs_memory"]


def fuses(z: mx.array, facts: RowFacts) -> bool:
    """Whether the device has the fused operations for these rows; their exponentials are too rough for float32."""
    return facts.target is not None and z.dtype.size < 4 and has_fused_loss()


def needs_memory(facts: RowFacts) -> bool:
    """Whether the logits have to be in float32 on the way: they are as they come where nothing is done to them."""
    return facts.terms.smoothing or facts.terms.softcap or facts.terms.scale


class FusedBlock(Block):
    """R rows of raw logits z with class indices."""

    def forward(self, asked: Asked) -> Found:
        """Return the losses and what else is asked for."""
        facts, terms, x = self.facts, self.terms, self.x
        share = self._share()[:, 0]
        x_y = self._at_target(x).astype(self.acc)
        grad = None
        if asked.grad and not terms.z_loss:
            surprise, grad = self._pass(share, None)
        else:
            surprise = self._surprise(x)
            grad = self._pass(share, surprise + x_y)[1] if asked.grad else None
        rounded = surprise
        surprise = self._exact(rounded, x_y)
        lse = rounded + x_y
        loss = product(share, surprise)
        if terms.smoothing:
            gaps = lse[:, None] - x
            spread = gaps if facts.class_weight is None else product(facts.class_weight, gaps)
            loss = loss + self.spread * spread.sum(-1)
        if terms.z_loss:
            loss = loss + self.z_loss * mx.square(lse)
        return Found(
            loss=mx.where(facts.dead, 0, facts.weight * loss),
            grad=grad,
            norm=mx.stack([lse, mx.zeros_like(lse)], axis=-1) if asked.norm else None,
            nll=surprise if asked.nll else None,
            entropy=self._entropy(lse) if asked.entropy else None,
            predictions=self._predictions() if asked.predictions else None,
        )

    def backward(self, norm: mx.array) -> mx.array:
        """Return the gradient from the norm (R, 2), of which this needs the sum alone, and made no more."""
        return self._pass(self._share()[:, 0], norm.sum(-1))[1]

    def _activations(self) -> tuple[mx.array, mx.array | None]:
        return super()._activations() if needs_memory(self.facts) else (self.z, None)

    def _surprise(self, x: mx.array) -> mx.array:
        """Return lse - x_y (R,), accumulated in float32."""
        made: mx.array = mx.fast.cross_entropy(x, self._classes()[:, 0])
        return made

    def _exact(self, surprise: mx.array, x_y: mx.array) -> mx.array:
        """Return lse - x_y (R,) for the target logits as they were before they were rounded to x_y."""
        target_logits = self.facts.target_logits
        if target_logits is None or needs_memory(self.facts):
            return surprise
        above = target_logits - x_y
        return surprise - above + mx.log1p(mx.exp(-surprise) * mx.expm1(above))

    def _pass(self, share: mx.array, lse: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return lse - x_y (R,), and the gradient with respect to z; lse is needed for the z term alone."""
        facts, terms = self.facts, self.terms
        factor = facts.scale * self.scale if terms.scale else facts.scale
        total = share
        if terms.smoothing:
            total = total + self.spread * self.total_weight
        if terms.z_loss and lse is not None:
            total = total + 2 * self.z_loss * lse
        (surprise,), (grad,) = mx.vjp(self._surprise, [self.x], [factor * total])
        more = self._more_at_target(surprise, total, share)
        if more is not None:
            grad = grad.at[mx.arange(len(grad)), facts.target].add((factor * more).astype(grad.dtype))
        if terms.smoothing:
            each = (factor * self.spread)[:, None]
            grad = grad - (each if facts.class_weight is None else each * facts.class_weight)
        if self.slope is not None:
            grad = grad * self.slope
        if not facts.finite:
            grad = mx.where(facts.dead[:, None], 0, grad)
        return surprise, grad.astype(self.z.dtype)

    def _more_at_target(self, surprise: mx.array, total: mx.array, share: mx.array) -> mx.array | None:
        """Return what the target's element lacks, over r (R,): c / r - (1-e) w_y, and what the rounding of x_y took."""
        more = total - share if self.terms.smoothing or self.terms.z_loss else None
        if self.facts.target_logits is None or needs_memory(self.facts):
            return more
        x_y = self._at_target(self.x).astype(self.acc)
        taken = total * (mx.expm1(-self._exact(surprise, x_y)) - mx.expm1(-surprise))
        return taken if more is None else taken + more

    def _entropy(self, lse: mx.array) -> mx.array:
        below = lse[:, None] - self.x
        return product(mx.exp(-below), below).sum(-1)
