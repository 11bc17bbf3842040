"""`Computed8`: logits and gradients of a product whose factors are quantized to 8 bits (``precision="fp8"``)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Coefficients, Loaded, Schedule, wide
from xent.backends.torch.fp8 import Arithmetic, Entries, Factors, Quantized, add_at, padded
from xent.backends.torch.memory import cast
from xent.backends.torch.products import Classifier, ProductSum, kept_dtype
from xent.backends.torch.sources import Computed, Stored, most_columns, part_rows
from xent.core.call import Classes, Product

__all__ = ["Computed8"]

_LIKELIEST = 8
"""The classes of a row, besides the target, that are not quantized."""
_GROUP = 2**14
"""The classes for which a row of the gradient has one scale, and whose columns are quantized at a time."""
_PIECE_BYTES, _LEAST_PIECE = 32 * 2**20, 256
"""Of the classifier's gradient of a part that is computed at a time, and its least number of classes."""


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
        self, arithmetic: Arithmetic, columns: Quantized, hidden: Tensor, ones: Tensor, start: int = 0
    ) -> None:
        """Add the product of columns from `start` on of a part's gradient (C, R) and codes of hidden states (D, R)."""
        classes, width = self._like.shape
        stop = min(start + len(columns.codes), classes)
        if self._sum is None and stop - start == classes:
            self._sum = arithmetic.product(*columns[:2], hidden, ones)[:classes, :width].to(self._dtype).contiguous()
            return
        if self._sum is None:
            self._sum = torch.zeros(classes, width, dtype=self._dtype, device=self._like.device)
        step = max(padded(_PIECE_BYTES // (2 * width)), _LEAST_PIECE)
        for first in range(start, stop, step):
            piece, total = slice(first - start, first - start + step), self._sum[first : min(first + step, stop)]
            total += arithmetic.product(columns.codes[piece], columns.scale[piece], hidden, ones)[: len(total), :width]

    def add_entries(self, arithmetic: Arithmetic, hidden: Tensor, entries: Entries) -> None:
        """Add the exact part of all rows."""
        if self._sum is not None:
            arithmetic.add_to_classes(self._sum, hidden, entries)


class Computed8(Computed):
    """Logits (R, C) of hidden states and a classifier, part by part, and the gradients of both.

    The gradient of a part's logits is in their memory, in bfloat16, until it is quantized. The scales of hidden states
    and classifier are those of their rows, so logits do not depend on the parts.
    """

    _codes: Quantized
    """The hidden states of the current part."""
    _likely: Tensor
    """(R, E) int64: the likeliest classes of its rows."""

    def _open(self, source: Any, reuse: bool) -> int:
        setting, self.skips = self._setting, True
        source = self._gathered(source)
        self._arithmetic: Arithmetic = self._steps.arithmetic
        transposes = self.needs_gradient and setting.needs[0]
        self._head = self._classifier = _Head(source, setting.width, setting.needs, self._arithmetic, transposes)
        self._ids: Tensor | None = None
        """(N,) int64: the targets relative to the first class of this rank. None for class probabilities."""
        if isinstance(setting.call.target, Classes):
            self._ids = setting.call.target.ids.to(torch.int64) - setting.first
        scale = setting.call.activation.logit_scale
        count = 0 if isinstance(scale, float | int) and scale < 0 else min(_LIKELIEST, self._head.classes)
        self._likeliest = count
        """The number of likeliest classes; none if the logit scale is a negative number."""
        self._entries: Entries | None = None
        """Those of all rows, for the gradients of the classifier and the bias."""
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
        if needs[1] or needs[2]:
            shape = self._setting.count, self._likeliest + int(self._ids is not None)
            self._entries = Entries(
                torch.full(shape, -1, dtype=torch.int64, device=device),
                torch.zeros(shape, dtype=torch.float32, device=device),
            )

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
            self._likely = loaded.logits.new_empty(count, 0, dtype=torch.int64)
            if self._likeliest:
                self._likely = self._arithmetic.likeliest(loaded.logits, self._likeliest)
                self._arithmetic.correct(loaded.logits, loaded.hidden, head.weight, head.bias, self._likely)
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
        part, grad, head = loaded.part, loaded.grad, self._head
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
        entries = self._exact_entries(loaded, grad)
        count, width = part.stop - part.start, head.hidden.shape[1]
        sends = part.last and self._setting.call.shards is not None
        # The first product of the classifier's gradient is that gradient, and gets the memory that the logits had. The
        # sum of the hidden states' gradient over ranks starts before the last products of the classifier's.
        waits = of_weight is not None and (sends or (of_weight.is_empty and count <= 2 * width))
        columns: Quantized | None = None
        if of_weight is not None:
            classes = head.classes if waits else min(_GROUP, head.classes)
            columns = arithmetic.memory(classes, count, head.hidden.device)
        total: Tensor | None = None
        """(R', D'): the product of the hidden states' gradient."""
        trains = of_input is not None or of_weight is not None
        for start in range(0, head.classes if trains else 0, _GROUP):
            group = range(start, min(start + _GROUP, head.classes))
            product = self._add_group(grad, group, hidden, columns, waits)
            if product is not None:
                alone = len(group) == head.classes
                total = product if alone else product.float() if total is None else total.add_(product)
        loaded.logits = loaded.grad = grad = None
        if part.last:
            del head.quantized_rows
        if of_input is not None and total is not None:
            arithmetic.put_hidden(total[:count, :width], head.weight, entries, part, of_input)
        if sends:
            self._send()
        if of_weight is not None and columns is not None and waits:
            of_weight.add_quantized(arithmetic, columns, hidden.transposed, self._ones)

    def _exact_entries(self, loaded: Loaded, grad: Tensor) -> Entries:
        """Return the exact entries of a part, and set those in the gradient to 0; the target's are 0 there already."""
        part, ids = loaded.part, self._likely
        entries = Entries(ids, grad.gather(1, ids).float())
        grad.scatter_(1, ids, 0)
        if loaded.target_grad is not None and self._ids is not None:
            ids = torch.cat((self._ids[part.indices, None], ids), 1)
            entries = Entries(ids, torch.cat((loaded.target_grad[:, None], entries.grads), 1))
        if self._entries is not None:
            stored = entries._replace(ids=entries.ids.masked_fill(entries.grads == 0, -1))
            for own, of_all in zip(stored, self._entries, strict=True):
                part.put(own, of_all)
        return entries

    def _add_group(
        self, grad: Tensor, group: range, hidden: Quantized, columns: Quantized | None, waits: bool
    ) -> Tensor | None:
        """Quantize the gradient of a group of classes, and add its products to the classifier's, unless that `waits`.

        `columns` is memory for the columns' codes: of all classes if the classifier's gradient waits, else of a group.
        Return the product of the rows with the classifier.
        """
        gradients: list[Any] = self._gradients
        arithmetic, head, (of_input, of_weight, _) = self._arithmetic, self._head.quantized_rows, gradients
        in_group, own = slice(group.start, group.start + padded(len(group))), grad[:, group.start : group.stop]
        rows = by_column = None
        if of_input is not None:
            rows = Factors(*arithmetic.memory(len(own), len(group), grad.device)[:2], head.scale[in_group])
        if columns is not None:
            place = in_group if waits else slice(0, padded(len(group)))
            by_column = Factors(columns.codes[place], columns.scale[place], hidden.scale)
        arithmetic.quantize_gradient(own, rows, by_column)
        if of_weight is not None and by_column is not None and not waits:
            of_group = Quantized(*by_column[:2])
            of_weight.add_quantized(arithmetic, of_group, hidden.transposed, self._ones, group.start)
        if rows is None:
            return None
        weight: Any = head.transposed
        return arithmetic.product(*rows[:2], weight[:, in_group], self._ones)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients, with the exact part of those of classifier and bias."""
        (_, of_weight, of_bias), entries = self._gradients, self._entries
        if of_weight is not None and entries is not None:
            of_weight.add_entries(self._arithmetic, self._head.hidden, entries)
        if of_bias is not None and len(of_bias) and self._ids is not None and entries is not None:
            places, of_targets = self._ids.clamp(0, len(of_bias) - 1), entries.grads[:, 0]
            add_at(of_bias, places, of_targets.to(of_bias.dtype))
        return super().gradients()
