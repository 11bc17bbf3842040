"""A block of rows with class indices on a GPU, on `mlx.core.fast.cross_entropy`.

With b the loss it returns, lse - x_y, and its gradient alpha (p - [c==y]) for the upstream gradient alpha of b::

    lse   = b + x_y
    dL/dx = alpha (p - [c==y]) + (alpha - gamma) [c==y] - delta w_c

Where the target's logit was rounded and is known better, b and the target's p are corrected for it.
"""

import mlx.core as mx

from xent.backends.mlx.block import Block
from xent.backends.mlx.devices import has_fused_loss
from xent.backends.mlx.finish import Coefficients, Gap, Sums, coefficients, product
from xent.backends.mlx.kernels import Asked, RowFacts

__all__ = ["FusedBlock", "fuses", "needs_memory"]


def fuses(z: mx.array, facts: RowFacts) -> bool:
    """Whether the device has the fused operations for these rows; their exponentials are too rough for float32."""
    served = facts.target is not None and facts.inside is None and "entropy" not in facts.upstream
    return served and z.dtype.size < 4 and has_fused_loss()


def needs_memory(facts: RowFacts) -> bool:
    """Whether the logits have to be in float32 on the way: they are as they come where nothing is done to them."""
    return facts.terms.smoothing or facts.terms.softcap or facts.terms.scale


class FusedBlock(Block):
    """R rows of raw logits z with class indices."""

    _passed: tuple[mx.array, mx.array] | None = None

    def fold(self, asked: Asked) -> Sums:
        """Return what the rows add up to; where alpha is known beforehand, the gradient is made in the same pass."""
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
        """Return lse - x_y (R,) for the target logits as they were before they were rounded to x_y."""
        target_logits = self.facts.target_logits
        if target_logits is None or needs_memory(self.facts):
            return surprise
        above = target_logits - self._at_target(self.x).astype(self.acc)
        return surprise - above + mx.log1p(mx.exp(-surprise) * mx.expm1(above))

    def _pass(self, given: Coefficients) -> tuple[mx.array, mx.array]:
        """Return lse - x_y (R,), and the gradient alpha (p - [c==y]) (R, V); once."""
        if self._passed is None:
            (surprise,), (grad,) = mx.vjp(self._surprise, [self.x], [given.alpha])
            self._passed = surprise, grad
        return self._passed
