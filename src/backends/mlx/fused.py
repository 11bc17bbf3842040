"""A block of rows with class indices on a GPU, computed with `mlx.core.fast.cross_entropy`.

That function returns the loss b = lse - x_y; its gradient for an upstream gradient alpha is alpha (p - [c==y]). So::

    lse   = b + x_y
    dL/dx = alpha (p - [c==y]) + (alpha - gamma) [c==y] - delta w_c

If the target's logit is also given before rounding, b and the target's p are corrected for the difference.
"""

import mlx.core as mx

from xent.backends.mlx.block import Block
from xent.backends.mlx.devices import has_fused_loss
from xent.backends.mlx.finish import Coefficients, Gap, Sums, coefficients, product
from xent.backends.mlx.kernels import Asked, RowFacts

__all__ = ["FusedBlock", "fuses", "needs_memory"]


def fuses(z: mx.array, facts: RowFacts) -> bool:
    """Whether the fused operations can compute these rows. For float32 their exponentials are not accurate enough."""
    served = facts.target is not None and "entropy" not in facts.upstream
    return served and z.dtype.size < 4 and has_fused_loss()


def needs_memory(facts: RowFacts) -> bool:
    """Whether a float32 copy of the logits is needed: only if scale, softcap or temperature change them."""
    return facts.terms.smoothing or facts.terms.softcap or facts.terms.scale


class FusedBlock(Block):
    """R rows of raw logits z with class indices."""

    _passed: tuple[mx.array, mx.array] | None = None

    def fold(self, asked: Asked) -> Sums:
        """Return the sums of the rows. If alpha is known before, the gradient is computed in the same pass."""
        facts = self.facts
        if asked.grad and not facts.terms.z_loss:
            surprise = self._pass(coefficients(facts, None, 1.0))[0]
        else:
            surprise = self._surprise(self.x)
        lse = surprise + self._at_target(self.x).astype(self.acc)
        below = lse[:, None] - self.x
        p = mx.exp(-below)
        return Sums(
            peak=lse,
            log_sum=mx.zeros_like(lse),
            target=Gap(self._exact(surprise)),
            classes=self._classes(below) if facts.terms.smoothing else None,
            expected=product(p, below).sum(-1) if asked.entropy else None,
            best=self._best() if asked.predictions else None,
            squares=mx.square(p).sum(-1) if asked.log_sum_sq_probs else None,
            level=self._level(below, lse) if asked.mean_logit else None,
        )

    def gradient(self, given: Coefficients, peak: mx.array, log_sum: mx.array) -> mx.array:
        """Return the gradient with respect to z."""
        surprise, grad = self._pass(given)
        more = given.rest
        if self.facts.target_logits is not None and not needs_memory(self.facts):
            taken = given.alpha * (mx.expm1(-self._exact(surprise)) - mx.expm1(-surprise))
            more = taken if more is None else taken + more
        if more is not None:
            grad = grad.at[self._place()].add(more.astype(grad.dtype))
        return self._finished(grad, given.delta)

    def _activations(self) -> tuple[mx.array, mx.array | None]:
        return super()._activations() if needs_memory(self.facts) else (self.z, None)

    def _surprise(self, x: mx.array) -> mx.array:
        """Return lse - x_y (R,), accumulated in float32."""
        made: mx.array = mx.fast.cross_entropy(x, self._index()[:, 0])
        return made

    def _exact(self, surprise: mx.array) -> mx.array:
        """Return lse - x_y (R,), corrected for the rounding of the target logits x_y."""
        target_logits = self.facts.target_logits
        if target_logits is None or needs_memory(self.facts):
            return surprise
        above = target_logits - self._at_target(self.x).astype(self.acc)
        return surprise - above + mx.log1p(mx.exp(-surprise) * mx.expm1(above))

    def _pass(self, given: Coefficients) -> tuple[mx.array, mx.array]:
        """Return lse - x_y (R,) and the gradient alpha (p - [c==y]) (R, V), computed once."""
        if self._passed is None:
            (surprise,), (grad,) = mx.vjp(self._surprise, [self.x], [given.alpha])
            self._passed = surprise, grad
        return self._passed
