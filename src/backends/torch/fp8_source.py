"""`Computed8`: logits and gradients of a product whose factors are quantized to 8 bits (``precision="fp8"``)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Coefficients, Loaded, Schedule, wide
from xent.backends.torch.fp8 import Arithmetic, Quantized, padded
from xent.backends.torch.memory import cast
from xent.backends.torch.products import Classifier, ProductSum, kept_dtype
from xent.backends.torch.sources import Computed, Stored, most_columns, part_rows
from xent.core.call import Classes, Product

__all__ = ["Computed8"]

_BLOCK_BYTES = 64 * 2**20
"""Of the codes of a block of classes and of its product, see `Computed8.add`."""
_BLOCK_CLASSES = 256
"""A block has a multiple of these."""


class _Head(Classifier):
    """A classifier with its codes. It is not padded in 16 bits."""

    def __init__(
        self, source: Product, width: int, needs: tuple[bool, ...], arithmetic: Arithmetic, transposes: bool
    ) -> None:
        """`transposes`: there is a gradient of the hidden states to compute."""
        assert source.dtype is not None
        compute = getattr(torch, source.dtype)
        super().__init__(source._replace(input=cast(source.input, compute)), width, needs)
        self.columns = width
        self.quantized_rows: Quantized = arithmetic.quantize(self.weight, transposes)

    def _extended(self, array: Tensor) -> Tensor:
        return array


class _Sum(ProductSum):
    """The sum of the classifier's gradients of parts."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added yet: the sum has no memory."""
        return self._sum is None

    def add_quantized(self, arithmetic: Arithmetic, columns: Quantized, hidden: Any, ones: Tensor, start: int) -> None:
        """Add the product of columns from `start` on of a part's gradient (C, R) and codes of hidden states (D, R)."""
        classes, width = self._like.shape
        product = arithmetic.product(*columns[:2], hidden, ones)[: classes - start, :width]
        if self._sum is None and len(product) == classes:
            self._sum = product.to(self._dtype).contiguous()
            return
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=self._dtype)
        self._sum[start : start + len(product)] += product

    def add_targets(self, arithmetic: Arithmetic, hidden: Tensor, ids: Tensor, of_targets: Tensor) -> None:
        """Add the exact part of all rows."""
        if self._sum is not None:
            arithmetic.add_to_classes(self._sum, hidden, ids, of_targets)


class Computed8(Computed):
    """Logits (R, C) of hidden states and a classifier, part by part, and the gradients of both.

    The gradient of a part's logits is in their memory, in bfloat16, until it is quantized. The scales of hidden states
    and classifier are those of their rows, so logits do not depend on the parts.
    """

    def _open(self, source: Any, reuse: bool) -> int:
        setting, self.skips = self._setting, True
        source = self._gathered(source)
        self._arithmetic: Arithmetic = self._steps.arithmetic
        transposes = self.needs_gradient and setting.needs[0]
        self._head = self._classifier = _Head(source, setting.width, setting.needs, self._arithmetic, transposes)
        self._ids: Any = None
        """(N,) int64: the targets relative to the first class of this rank. None for class probabilities."""
        if isinstance(setting.call.target, Classes):
            self._ids = setting.call.target.ids.to(torch.int64) - setting.first
        self._of_targets: Any = None
        """(N,) float32: the gradients of the targets' logits, for the gradients of the classifier and the bias."""
        self._codes: Any = None
        """Those of the hidden states of the current part."""
        return part_rows(setting, padded(most_columns(setting, setting.width)), 2, source.workspace)

    def start(self, schedule: Schedule) -> None:
        """Receive the schedule, and allocate the gradients."""
        self._schedule, head, needs, source = schedule, self._head, self._setting.needs, self._product
        if not self.needs_gradient:
            return
        hidden, device = head.hidden, self._setting.device
        self._ones = torch.ones(padded(hidden.shape[1]), dtype=torch.float32, device=device)
        self._gradients = [
            hidden.new_empty(hidden.shape, dtype=kept_dtype(source.input.dtype)) if needs[0] else None,
            _Sum(head.weight, source.weight.dtype, schedule.chunks) if needs[1] else None,
            torch.zeros(head.classes, dtype=wide(head.compute), device=device) if needs[2] else None,
        ]
        if self._ids is not None:
            self._of_targets = torch.zeros(self._setting.count, dtype=torch.float32, device=device)

    def blocks(self, loaded: Loaded, writes: bool = True) -> Iterator[Block]:
        """Yield all rows of a part in one block."""
        head, trains = self._head, self.needs_gradient and self._setting.needs[1]
        count = loaded.part.stop - loaded.part.start
        if loaded.logits is None:
            self._codes = self._arithmetic.quantize(loaded.hidden, trains and loaded.trained is loaded.hidden)
            factors = self._codes.codes, self._codes.scale, head.quantized_rows.codes, head.quantized_rows.scale
            loaded.logits = head.hidden.new_empty(count, 0)
            if head.classes:
                loaded.logits = self._arithmetic.product(*factors)[:count, : head.classes]
            if head.bias is not None:
                loaded.logits += head.bias
        of_targets = None
        if self.needs_gradient:
            loaded.grad = loaded.logits
            if self._ids is not None:
                of_targets = loaded.target_grad = torch.zeros(count, dtype=torch.float32, device=self._setting.device)
        more = loaded.target_logits, None, loaded.input_checks, of_targets
        yield Block(loaded.logits, 0, 0, loaded.grad, *more)

    def differentiate(self, loaded: Loaded, coefficients: Coefficients) -> None:
        """Write the gradient of a part's logits."""
        Stored.differentiate(self, loaded, coefficients)

    def add(self, loaded: Loaded) -> None:
        """Quantize the gradient of a part's logits, and multiply it into those of hidden states and classifier."""
        part, grad, of_targets, head = loaded.part, loaded.grad, loaded.target_grad, self._head
        gradients: list[Any] = self._gradients
        arithmetic, (of_input, of_weight, of_bias) = self._arithmetic, gradients
        if not head.classes and of_input is not None:
            part.put(of_input.new_zeros(part.stop - part.start, of_input.shape[1]), of_input)
        if grad is None or not head.classes:
            return
        hidden = self._codes
        if of_weight is not None and hidden.transposed is None:
            hidden = arithmetic.quantize(loaded.trained, True)
        if of_bias is not None:
            of_bias += grad.sum(0, dtype=of_bias.dtype)
        # The first product of the classifier's gradient is that gradient. The codes of all classes take less memory.
        whole = of_weight is not None and of_weight.is_empty and len(grad) <= head.hidden.shape[1]
        sends = part.last and self._setting.call.shards is not None
        del grad
        if whole or sends:
            self._add_blocks(loaded, hidden, of_input, None, False)
            of_input = None
            if sends:  # the sum over ranks starts before the products of the classifier's gradient
                self._send()
        self._add_blocks(loaded, hidden, of_input, of_weight, whole)
        if of_targets is not None:
            part.put(of_targets, self._of_targets)

    def _add_blocks(self, loaded: Loaded, hidden: Quantized, of_input: Any, of_weight: Any, whole: bool) -> None:
        """Add the products of a part: a block of classes at a time, so that few codes are in memory, or `whole`."""
        part, head = loaded.part, self._head
        count, (classes, width) = part.stop - part.start, head.weight.shape
        step = max(_BLOCK_BYTES // (2 * (count + width)) // _BLOCK_CLASSES, 1) * _BLOCK_CLASSES
        total: Any = None
        """(R', D'): the product of the hidden states' gradient."""
        for start in range(0, classes, classes if whole else step):
            stop = min(start + step, classes) if not whole else classes
            product = self._add_block(loaded, hidden, start, stop, of_input is not None, of_weight)
            if product is None:
                continue
            if total is None:
                total = product if stop == classes else product.float()
            else:
                total += product
        if total is not None:
            total = total[:count, : head.hidden.shape[1]]
            self._arithmetic.put_hidden(total, head.weight, self._ids, loaded.target_grad, part, of_input)

    def _add_block(
        self, loaded: Loaded, hidden: Quantized, start: int, stop: int, of_input: bool, of_weight: Any
    ) -> Tensor | None:
        """Quantize the gradient of a block of classes. Return its product with the classifier, if `of_input`."""
        arithmetic, head, of_block = (
            self._arithmetic,
            self._head.quantized_rows,
            slice(start, start + padded(stop - start)),
        )
        grad: Any = loaded.grad
        rows, columns = arithmetic.quantize_gradient(
            grad[:, start:stop],
            head.scale[of_block] if of_input else None,
            None if of_weight is None else hidden.scale,
        )
        if stop == grad.shape[1] and of_weight is not None:
            loaded.logits = loaded.grad = None
        del grad
        product = None
        if rows is not None:
            weight: Any = head.transposed
            product = arithmetic.product(rows.codes, rows.scale, weight[:, of_block], self._ones)
        if columns is not None:
            of_weight.add_quantized(arithmetic, columns, hidden.transposed, self._ones, start)
        return product

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients, with the targets' part of those of classifier and bias."""
        _, of_weight, of_bias = self._gradients
        ids, of_targets = self._ids, self._of_targets
        if of_targets is not None and of_weight is not None:
            of_weight.add_targets(self._arithmetic, self._head.hidden, ids, of_targets)
        if of_targets is not None and of_bias is not None and len(of_bias):
            places = ids.clamp(0, len(of_bias) - 1)
            of_bias.index_put_((places,), of_targets.to(of_bias.dtype), accumulate=True)
        return super().gradients()
