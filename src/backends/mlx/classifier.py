"""The classifier of a linear call: matrix products with a dense or a quantized weight.

MLX rounds products of 16-bit arrays to 16 bits. For float32 products the arrays are converted to float32: of a dense
weight a range of classes at a time, of a quantized weight only the scales. MLX may multiply float32 arrays in TF32 on
NVIDIA GPUs. TF32 represents bfloat16 and float16 numbers exactly.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from xent.core.spec import QuantizedWeight

__all__ = ["Classifier"]

# On a CPU, MLX allocates memory for about 16 ranges ahead of the one that it computes.
_CONVERTED_BYTES = 8 * 2**20
_MOST_RANGES = 64


@dataclass(frozen=True, eq=False)
class Classifier:
    """Weight (V, D), dense or quantized, and bias (V,) or None. MLX does not differentiate these products."""

    weight: mx.array | QuantizedWeight
    bias: mx.array | None
    vocabulary: int
    exact: bool
    """Whether logits are computed in float32 or float64."""

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits (R, V) for hidden states (R, D)."""
        if self.exact and hidden.dtype.size < 4:
            return self._wide_logits(hidden.astype(mx.float32))
        if isinstance(self.weight, QuantizedWeight):
            made = self._product(hidden, transpose=True)
            return made if self.bias is None else made + self.bias
        if self.bias is None:
            return hidden @ self.weight.T
        return mx.addmm(self.bias, hidden, self.weight.T)

    def input_gradient(self, grad_logits: mx.array) -> mx.array:
        """Return the gradient of hidden states (R, D) for the gradient of the logits (R, V)."""
        if isinstance(self.weight, QuantizedWeight):
            return self._product(grad_logits, transpose=False)
        return grad_logits @ self.weight

    def target_logits(self, hidden: mx.array, target: mx.array) -> mx.array:
        """Return the float32 logits (R,) of each row's target class."""
        found = (hidden.astype(mx.float32) * self._rows(target).astype(mx.float32)).sum(-1)
        return found if self.bias is None else found + self.bias[target].astype(mx.float32)

    def _wide_logits(self, hidden: mx.array) -> mx.array:
        """Return float32 logits (R, V) for float32 hidden states (R, D), one range of classes after the other."""
        bias = None if self.bias is None else self.bias.astype(mx.float32)
        if isinstance(self.weight, QuantizedWeight):
            made = self._product(hidden, transpose=True)
            return made if bias is None else made + bias
        step, tie = self._classes_converted(), list[mx.array]()
        joined: mx.array | None = None
        for first in range(0, self.vocabulary, step):
            some = slice(first, first + step)
            weight = mx.depends(self.weight[some], tie) if tie else self.weight[some]
            columns = weight.astype(mx.float32).T
            tile = hidden @ columns if bias is None else mx.addmm(bias[some], hidden, columns)
            tie = [tile]
            if tile.shape[-1] == self.vocabulary:
                return tile
            joined = mx.zeros((len(hidden), self.vocabulary)) if joined is None else joined
            joined[:, some] = tile
        assert joined is not None
        return joined

    def _classes_converted(self) -> int:
        """Return the number of classes whose weight is converted at one time."""
        row = 4 * self.weight.shape[1]
        return min(max(_CONVERTED_BYTES // row, -(-self.vocabulary // _MOST_RANGES)), self.vocabulary)

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
        """Return the rows (R, D) of the weight for these classes."""
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
