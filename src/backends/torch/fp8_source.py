"""`Computed8`: logits and gradients of a product whose factors are quantized to 8 bits (``precision="fp8"``)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Coefficients, Loaded, Schedule, wide
from xent.backends.torch.fp8 import CODES, Arithmetic, Factors, Quantized, padded
from xent.backends.torch.memory import cast
from xent.backends.torch.products import Classifier, ProductSum, kept_dtype
from xent.backends.torch.sources import Computed, Stored, most_columns, part_rows
from xent.core.call import Classes, Product

__all__ = ["Computed8"]

_GROUP = 2**15
"""Classes for which a row of the gradient has one scale."""
_BLOCK_BYTES, _LEAST_BLOCK = 64 * 2**20, 256
"""Of a block of classes: the bytes of its columns' codes and of their product, and its least number of classes."""


def block_classes(width: int, rows: int) -> int:
    """Return the number of classes, a power of two, of a block of the gradient of `rows` rows."""
    most = max(_BLOCK_BYTES // (2 * width + rows), _LEAST_BLOCK)
    return min(1 << (most.bit_length() - 1), _GROUP)


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

    def add_quantized(
        self, arithmetic: Arithmetic, columns: Quantized, hidden: Any, ones: Tensor, start: int = 0
    ) -> None:
        """Add the product of columns from `start` on of a part's gradient (C, R) and codes of hidden states (D, R)."""
        classes, width = self._like.shape
        stop = min(start + len(columns.codes), classes)
        if self._sum is None and stop - start == classes:
            self._sum = arithmetic.product(*columns[:2], hidden, ones)[:classes, :width].to(self._dtype).contiguous()
            return
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=self._dtype)
        step = block_classes(*hidden.shape)
        for first in range(start, stop, step):
            block, total = slice(first - start, first - start + step), self._sum[first : min(first + step, stop)]
            total += arithmetic.product(columns.codes[block], columns.scale[block], hidden, ones)[: len(total), :width]

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
        self._room: Any = None
        """(R', C') bfloat16: the memory of its logits."""
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
                self._room = self._arithmetic.product(*factors)
                loaded.logits = self._room[:count, : head.classes]
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
        count, width = part.stop - part.start, head.hidden.shape[1]
        sends = part.last and self._setting.call.shards is not None
        # The first product of the classifier's gradient is that gradient, and gets the memory that the logits had. The
        # sum of the hidden states' gradient over ranks starts before the last products of the classifier's.
        waits = of_weight is not None and (sends or (of_weight.is_empty and count <= 2 * width))
        columns: Any = None
        if of_weight is not None:
            classes = head.classes if waits else min(block_classes(width, count), head.classes)
            columns = arithmetic.memory(classes, count, head.hidden.device)
        total: Any = None
        """(R', D'): the product of the hidden states' gradient."""
        for start in range(0, head.classes, _GROUP):
            group = range(start, min(start + _GROUP, head.classes))
            product = self._add_group(grad, group, hidden, columns, waits)
            if product is not None:
                alone = len(group) == head.classes
                total = product if alone else product.float() if total is None else total.add_(product)
        loaded.logits = loaded.grad = self._room = grad = None
        if total is not None:
            total = total[:count, :width]
            arithmetic.put_hidden(total, head.weight, self._ids, of_targets, part, of_input)
        if sends:
            self._send()
        if waits:
            of_weight.add_quantized(arithmetic, columns, hidden.transposed, self._ones)
        if of_targets is not None:
            part.put(of_targets, self._of_targets)

    def _add_group(
        self, grad: Tensor, group: range, hidden: Quantized, columns: Quantized, waits: bool
    ) -> Tensor | None:
        """Quantize the gradient of a group of classes, and add its products to the classifier's, unless that `waits`.

        `columns` is memory for the columns' codes: of all classes if the classifier's gradient waits, else of a block.
        The rows' codes are written over the gradient. Return their product with the classifier.
        """
        arithmetic, head, (of_input, of_weight, _) = self._arithmetic, self._head.quantized_rows, self._gradients
        row_codes, in_group = self._room.view(CODES), slice(group.start, group.start + padded(len(group)))
        class_scale: Any = None if of_input is None else head.scale[in_group]
        row_scale: Any = None if of_weight is None else hidden.scale
        largest: Any = arithmetic.largest(grad[:, group.start : group.stop], class_scale, row_scale)
        scale: Any = None if class_scale is None else torch.empty_like(largest[0])
        step = block_classes(self._head.hidden.shape[1], len(grad))
        for start in range(group.start, group.stop, step):
            stop = min(start + step, group.stop)
            block = slice(start, start + padded(stop - start))
            in_block = slice(start - group.start, block.stop - group.start)
            rows = by_column = None
            if class_scale is not None:
                # Codes are written where the gradient of earlier classes was, but for those of the first block.
                codes = row_codes[:, block] if start else row_codes.new_empty(len(row_codes), block.stop)
                rows = Factors(codes, scale, largest[0], class_scale[in_block])
            if row_scale is not None:
                place = block if waits else slice(0, block.stop - start)
                by_column = Factors(columns.codes[place], columns.scale[place], largest[1][in_block], row_scale)
            arithmetic.quantize_gradient(grad[:, start:stop], rows, by_column)
            if rows is not None and not start:
                row_codes[:, block] = rows.codes
            if by_column is not None and not waits:
                of_block = Quantized(by_column.codes, by_column.scale)
                of_weight.add_quantized(arithmetic, of_block, hidden.transposed, self._ones, start)
        if class_scale is None:
            return None
        weight: Any = head.transposed
        return arithmetic.product(row_codes[:, in_group], scale, weight[:, in_group], self._ones)

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
