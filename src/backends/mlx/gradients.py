"""Accumulate the gradients of a linear call, as far as they are needed, from the gradients of chunks of logits."""

from collections.abc import Collection

import mlx.core as mx

from xent.backends.mlx.classifier import Classifier
from xent.backends.mlx.weight_gradient import WeightGradient, kept_dtype

__all__ = ["GradientSums"]


class GradientSums:
    """The gradients of "input", "weight" and "bias" that `needs` names, accumulated over chunks."""

    def __init__(self, needs: Collection[str], classifier: Classifier, input: mx.array, chunks: int) -> None:
        self._classifier, self._input, self._parts = classifier, input, list[mx.array]()
        self._needs_input = "input" in needs
        self._weight: WeightGradient | None = None
        self._bias: mx.array | None = None
        if "weight" in needs:
            self._weight = WeightGradient((classifier.vocabulary, input.shape[-1]), input.dtype, chunks)
        if "bias" in needs:
            wide = mx.float64 if input.dtype == mx.float64 else mx.float32
            self._bias = mx.zeros((classifier.vocabulary,), wide)

    def add(self, grad_logits: mx.array, hidden: mx.array, dead: mx.array) -> list[mx.array]:
        """Add a chunk: gradient of logits (R, V), hidden states (R, D), dead rows (R,). Return the computed arrays."""
        made, grad_logits = [], grad_logits.astype(hidden.dtype)
        if self._needs_input:
            part = mx.where(dead[:, None], 0, self._classifier.input_gradient(grad_logits))
            self._parts.append(part.astype(kept_dtype(self._input.dtype)))
            made.append(self._parts[-1])
        if self._weight is not None:
            # NaN in hidden states of dead rows must not reach the gradient of the weight as 0 * NaN.
            self._weight.add(grad_logits, mx.where(dead[:, None], 0, hidden))
            made += self._weight.sums
        if self._bias is not None:
            self._bias = self._bias + grad_logits.astype(self._bias.dtype).sum(0)
            made.append(self._bias)
        return made

    def result(self) -> dict[str, mx.array]:
        """Return the gradients by name, in the dtypes that they have until the upstream gradient is multiplied in."""
        made = {}
        if self._needs_input:
            made["input"] = mx.concatenate(self._parts).reshape(self._input.shape)
        if self._weight is not None:
            made["weight"] = self._weight.result()
        if self._bias is not None:
            made["bias"] = self._bias
        return made
