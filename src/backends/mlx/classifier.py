"""The classifier of `linear_cross_entropy`: matrix products with a dense or a quantized weight."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from xent.core.spec import QuantizedWeight

__all__ = ["Classifier"]


@dataclass(frozen=True, eq=False)
class Classifier:
    """Weight (V, D), dense or quantized, and bias (V,) or None; nothing here is differentiated by MLX."""

    weight: mx.array | QuantizedWeight
    bias: mx.array | None
    vocabulary: int

    def logits(self, hidden: mx.array) -> mx.array:
        """Return (R, V) for hidden (R, D)."""
        if isinstance(self.weight, QuantizedWeight):
            made = self._product(hidden, transpose=True)
            return made if self.bias is None else made + self.bias
        if self.bias is None:
            return hidden @ self.weight.T
        return mx.addmm(self.bias, hidden, self.weight.T)

    def input_gradient(self, grad_logits: mx.array) -> mx.array:
        """Return (R, D) for the gradient of the logits (R, V)."""
        if isinstance(self.weight, QuantizedWeight):
            return self._product(grad_logits, transpose=False)
        return grad_logits @ self.weight

    def target_logits(self, hidden: mx.array, target: mx.array) -> mx.array:
        """Return the float32 logits (R,) of each row's target class."""
        found = (hidden.astype(mx.float32) * self._rows(target).astype(mx.float32)).sum(-1)
        return found if self.bias is None else found + self.bias[target].astype(mx.float32)

    def _product(self, values: mx.array, transpose: bool) -> mx.array:
        weight = self.weight
        assert isinstance(weight, QuantizedWeight)
        made = mx.quantized_matmul(
            values,
            weight.packed,
            scales=weight.scales,
            biases=weight.biases,
            transpose=transpose,
            group_size=weight.group_size,
            bits=weight.bits,
            mode=weight.mode,
        )
        return made.astype(values.dtype)

    def _rows(self, target: mx.array) -> mx.array:
        """Return the rows (R, D) of the weight that belong to these classes."""
        weight = self.weight
        if not isinstance(weight, QuantizedWeight):
            return weight[target]
        biases = None if weight.biases is None else weight.biases[target]
        rows: Any = mx.dequantize(
            weight.packed[target],
            scales=weight.scales[target],
            biases=biases,
            group_size=weight.group_size,
            bits=weight.bits,
            mode=weight.mode,
        )
        return mx.array(rows)
