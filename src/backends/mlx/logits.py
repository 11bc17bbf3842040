"""Calls on logits in MLX, computed as one block."""

from collections.abc import Collection
from dataclasses import replace

import mlx.core as mx

from xent.backends.mlx import target_gradient
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.kernels import Asked, Found, Kernels
from xent.backends.mlx.support import Entries

__all__ = ["Logits"]


class Logits:
    """The rows of logits (..., V), with the methods of `xent.backends.mlx.linear.Chunks`."""

    def __init__(self, logits: mx.array, facts: Facts, kernels: Kernels) -> None:
        self._shape, self._facts, self._kernels = logits.shape, facts, kernels
        self._block = logits.reshape(facts.count, facts.vocabulary)

    def forward(self, needs: Collection[str]) -> tuple[Found, dict[str, mx.array]]:
        """Return the results of all rows, and the gradient if it is needed."""
        asked = Asked.of(self._facts.spec.stats, grad=bool(needs))
        found = self._kernels.forward(self._block, self._facts.all_rows(), asked)
        # Return the gradient without other references to it, so that MLX can reuse its memory.
        return replace(found, grad=None), {} if found.grad is None else {"logits": found.grad.reshape(self._shape)}

    def backward(self, facts: Facts, found: Found, needs: Collection[str]) -> dict[str, mx.array]:
        """Return the gradient from the norm."""
        assert found.norm is not None
        grad = self._kernels.backward(self._block, facts.all_rows(), found.norm)
        return {"logits": grad.reshape(self._shape)}

    def of_target(self, facts: Facts, found: Found) -> mx.array:
        """Return the gradient (N, V) of class probabilities."""
        assert found.norm is not None
        return target_gradient.placed(target_gradient.of_block(self._block, facts.rows, found.norm), facts)

    def pick(self, entries: Entries) -> mx.array:
        """Return the entries' logits: see `xent.backends.mlx.supported.Source`."""
        return self._block[entries.owner, entries.ids]

    def spread(self, values: mx.array, facts: Facts, needs: Collection[str]) -> dict[str, mx.array]:
        """Return the gradient from that of the picks: see `xent.backends.mlx.supported.Source`."""
        grad = facts.scattered(values.astype(self._block.dtype), 0, facts.count)
        return {"logits": grad.reshape(self._shape)}
