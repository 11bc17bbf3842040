"""Where the logits of a call come from, in parts of rows, and the sums of gradients: all matrix products of a call.

MLX chooses the order of evaluation. To keep only one part in memory, the rows of each part are made to depend
(`mx.depends`) on all results of the part before.

MLX rounds products of 16-bit arrays to 16 bits. For float32 products the arrays are converted to float32: of a dense
weight a range of classes at a time, of a quantized weight only the scales. MLX may multiply float32 arrays in TF32 on
NVIDIA GPUs. TF32 represents bfloat16 and float16 numbers exactly.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from xent.backends.mlx.devices import accumulation_dtype, chunk_device
from xent.backends.mlx.kernels import Facts
from xent.core.call import Call, Dense, Given, Product, Source, TopK, gathered, vocabulary_of
from xent.core.chunks import MOST_ROUNDED_SUMS_MLX, rows_per_chunk
from xent.core.spec import DIFFERENTIABLE, QuantizedWeight

__all__ = ["Gradients", "Loaded", "Logits", "cut", "is_exact"]

_WORKSPACE = {"mlx-cpu": 64 * 2**20, "metal": 512 * 2**20, "mlx-cuda": 1280 * 2**20}
_FEWEST_ROWS = 64
_PASSES = 4  # arrays of a part's size that a divergence needs beside its logits
_SLICE_BYTES = 32 * 2**20
# On a CPU, MLX allocates memory for about 16 ranges ahead of the one that it computes.
_CONVERTED_BYTES = 8 * 2**20
_MOST_RANGES = 64


def _logits(source: Product, hidden: mx.array, exact: bool) -> mx.array:
    """Return logits (R, V) for hidden states (R, D); `exact` ones are float32 or float64."""
    weight, bias = source.weight, source.bias
    widens = exact and hidden.dtype.size < 4
    if widens:
        hidden, bias = hidden.astype(mx.float32), None if bias is None else bias.astype(mx.float32)
    if isinstance(weight, QuantizedWeight):
        logits = _quantized(weight, hidden, True)
        return logits if bias is None else logits + bias
    if not widens:
        return _product(hidden, weight.T, bias)
    ranges, joined, tie = _ranges(weight), None, list[mx.array]()
    for classes in ranges:
        part = mx.depends(weight[classes], tie) if tie else weight[classes]
        tie = [_product(hidden, part.astype(mx.float32).T, None if bias is None else bias[classes])]
        if len(ranges) == 1:
            return tie[0]
        joined = mx.zeros((len(hidden), len(weight))) if joined is None else joined
        joined[:, classes] = tie[0]
    assert joined is not None
    return joined


def _ranges(weight: mx.array) -> list[slice]:
    """Return the ranges of classes that are converted to float32 at a time."""
    vocabulary, width = weight.shape
    step = min(max(_CONVERTED_BYTES // (4 * width), -(-vocabulary // _MOST_RANGES)), vocabulary)
    return [slice(first, first + step) for first in range(0, vocabulary, step)]


def _input_gradient(grad: mx.array, weight: mx.array | QuantizedWeight) -> mx.array:
    """Return the product (R, D) of a gradient of logits (R, V) with the classifier.

    That of float16 is float32, because it could overflow before the upstream gradient and 1/D are multiplied in.
    """
    widens = grad.dtype == mx.float16
    if isinstance(weight, QuantizedWeight):
        return _quantized(weight, grad.astype(mx.float32) if widens else grad, False)
    if not widens:
        return grad @ weight
    total = mx.zeros((len(grad), weight.shape[1]))
    for classes in _ranges(weight):
        part = mx.depends(weight[classes], [total])
        total = mx.addmm(total, grad[:, classes].astype(mx.float32), part.astype(mx.float32))
    return total


def _target_logits(source: Product, hidden: mx.array, target: mx.array) -> mx.array:
    """Return the float32 logits (R,) of each row's target class."""
    chosen: Any = gathered(source, target)
    rows = chosen.weight
    if isinstance(rows, QuantizedWeight):
        rows = mx.dequantize(*vars(rows).values())
    logits: mx.array = (hidden.astype(mx.float32) * rows.astype(mx.float32)).sum(-1)
    return logits if chosen.bias is None else logits + chosen.bias.astype(mx.float32)


def _product(hidden: mx.array, columns: mx.array, bias: mx.array | None) -> mx.array:
    return hidden @ columns if bias is None else mx.addmm(bias, hidden, columns)


def _quantized(weight: QuantizedWeight, array: mx.array, transpose: bool) -> mx.array:
    """Return the product of values with the transposed weight, or with the weight."""
    packed, scales, biases, *form = vars(weight).values()
    product: mx.array = mx.quantized_matmul(array, packed, scales, biases, transpose, *form).astype(array.dtype)
    return product


class Gradients:
    """The gradients of "input", "weight" and "bias" that `needs` names; without a classifier that of the first name.

    Those of rows are (N, D) or (N, V). The gradient of the classifier is a sum of grad_logits^T @ hidden over chunks.
    `mx.addmm` rounds a sum once. On the CPU it accumulates in place, in float32 or float64. On a GPU it always writes a
    new sum. There a bfloat16 gradient of few chunks is accumulated in bfloat16, which takes half the memory and has up
    to twice the error. Products of float16 could overflow, so they are float32. On Apple GPUs the sum is in slices of
    the vocabulary, which are concatenated at the end, so that only a slice exists twice. Not on NVIDIA GPUs: there MLX
    would copy and transpose a slice of the logits' columns before the product, which takes longer than the product.
    There the sum is hidden^T @ grad_logits, as in MLX's own gradient, and its transpose is returned.
    """

    def __init__(
        self,
        needs: Sequence[str],
        weight: mx.array | QuantizedWeight | None = None,
        dtype: mx.Dtype = mx.float32,
        parts: int = 1,
    ) -> None:
        """`weight` is the classifier, and `dtype` that of the hidden states."""
        self._classifier, self._needs = weight, needs
        self._rows: list[mx.array] = []
        self._bias: mx.array | None = None
        self.of_weight: list[mx.array] = []
        """The sum for the classifier, in slices of the vocabulary."""
        if weight is None or "weight" not in needs:
            return
        (vocabulary, width), device = weight.shape, chunk_device()
        on_cpu = device == "mlx-cpu"
        rounds = dtype == mx.bfloat16 and not on_cpu and parts <= MOST_ROUNDED_SUMS_MLX
        self._wide = dtype if dtype.size >= 4 or rounds else mx.float32
        self._casts = dtype == mx.float16 or (on_cpu and dtype != self._wide)
        self._transposed = device == "mlx-cuda"
        step = vocabulary if device != "metal" else max(_SLICE_BYTES // max(width * self._wide.size, 1), 1)
        self._slices = [slice(start, min(start + step, vocabulary)) for start in range(0, vocabulary, step)]

    def add(self, grad: mx.array, rows: mx.array, excluded: mx.array) -> list[mx.array]:
        """Add a part: gradient of logits (R, V), hidden states (R, D), excluded rows (R,). Return what it computed."""
        if self._classifier is None:
            self._rows.append(grad)
            return [grad]
        computed, grad = [], grad.astype(rows.dtype)
        if "input" in self._needs:
            self._rows.append(mx.where(excluded[:, None], 0, _input_gradient(grad, self._classifier)))
            computed.append(self._rows[-1])
        if "weight" in self._needs:
            # NaN in hidden states of excluded rows must not reach the gradient of the weight as 0 * NaN.
            self._add_to_weight(grad, mx.where(excluded[:, None], 0, rows))
            computed += self.of_weight
        if "bias" in self._needs:
            part = grad.astype(accumulation_dtype(rows.dtype)).sum(0)
            self._bias = part if self._bias is None else self._bias + part
            computed.append(self._bias)
        return computed

    def _add_to_weight(self, grad: mx.array, rows: mx.array) -> None:
        if self._casts:
            grad, rows = grad.astype(self._wide), rows.astype(self._wide)
        pairs = [(rows.T, grad)] if self._transposed else [(grad[:, part].T, rows) for part in self._slices]
        for at, pair in enumerate(pairs):
            if len(self.of_weight) == at:
                self.of_weight.append((pair[0] @ pair[1]).astype(self._wide))
            elif rows.dtype == self._wide:
                self.of_weight[at] = mx.addmm(self.of_weight[at], *pair)
            else:
                self.of_weight[at] = self.of_weight[at] + (pair[0] @ pair[1]).astype(self._wide)

    def result(self) -> dict[str, mx.array]:
        """Return the gradients by name, in the dtypes that they have until the upstream gradient is multiplied in.

        It may be called once, so that MLX can reuse the memory of the parts.
        """
        grads, rows = {}, self._rows
        if rows:
            name = self._needs[0] if self._classifier is None else "input"
            grads[name] = rows[0] if len(rows) == 1 else mx.concatenate(rows)
        rows.clear()
        if self.of_weight:
            sums = self.of_weight
            whole = sums[0] if len(sums) == 1 else mx.concatenate(sums)
            grads["weight"] = whole.T if self._transposed else whole
        if self._bias is not None:
            grads["bias"] = self._bias
        return grads


class Loaded(NamedTuple):
    """The logits of R rows."""

    rows: mx.array
    """(R, D) hidden states, or the logits."""
    logits: mx.array
    """(R, V)"""
    target_logits: mx.array | None = None
    """(R,) the targets' logits in float32, if the others are rounded to 16 bits."""


class Logits:
    """The logits of N rows."""

    def __init__(self, source: Source, skippable: mx.array | None, exact: bool, target: mx.array | None) -> None:
        """`skippable` rows (N,) are read as 0; None if all are read. `target` has the rows' classes, if there are any.

        `exact` says whether products are float32 or float64.
        """
        array: mx.array = source.logits if isinstance(source, Given) else source.input
        self._source, self._exact, self._skippable = source, exact, skippable
        self._rows = array.reshape(-1, array.shape[-1])
        # The rounding of the target's logit would be most of the error of the loss.
        self._target = None if exact or array.dtype.size >= 4 else target

    def load(self, part: slice, tie: list[mx.array]) -> Loaded:
        """Return the logits of some rows, computed after `tie`. Rows of which nothing is computed may be 0."""
        # All rows are the array itself, whose memory MLX can reuse then.
        rows = self._rows if part.stop - part.start == len(self._rows) else self._rows[part]
        rows = mx.depends(rows, tie) if tie else rows
        rows = rows if self._skippable is None else mx.where(self._skippable[part, None], 0, rows)
        source = self._source
        if isinstance(source, Given):
            return Loaded(rows, rows)
        target_logits = None if self._target is None else _target_logits(source, rows, self._target[part])
        return Loaded(rows, _logits(source, rows, self._exact), target_logits)


def is_exact(call: Call) -> bool:
    """Whether logits that the call computes must be float32 or float64."""
    options = call.options
    requested = options.exact or not set(DIFFERENTIABLE).isdisjoint(options.stats)
    return requested or isinstance(call.target, (Dense, TopK))


def cut(facts: Facts, trained: bool) -> list[slice]:
    """Return the rows of each part. `trained`: whether the classifier is expected to need a gradient."""
    source, target, count, device = facts.call.source, facts.call.target, facts.count, chunk_device()
    vocabulary = vocabulary_of(source)
    workspace = None if isinstance(source, Given) else source.workspace
    if isinstance(target, (Dense, TopK)):
        size = vocabulary * facts.weight.dtype.size * (2 if isinstance(target, Dense) else 1)
        size *= 1 if workspace else _PASSES
        step = rows_per_chunk(count, size, 1, workspace or max(_WORKSPACE[device], _FEWEST_ROWS * size), device)
    elif isinstance(source, Given):
        step = count
    else:
        exact = is_exact(facts.call)
        itemsize = max(source.input.dtype.size, 4 * exact)
        # The bits of an exact call must not depend on which gradients are needed.
        step = rows_per_chunk(count, vocabulary, itemsize, workspace, device, trained and not exact)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
