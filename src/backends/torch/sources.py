"""The sources of logits: stored ones, or hidden states and a classifier; and the places of their gradients.

A source yields the logits of a part in blocks, and takes the gradients of these blocks.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Coefficients, Loaded, Part, Schedule, Setting, Steps, exact, wide
from xent.backends.torch.memory import RowView, gradient_like, logit_blocks, span
from xent.backends.torch.portable.facts import index_of
from xent.backends.torch.products import Classifier, ProductSum, kept_dtype, padded_columns, rounds_sums
from xent.core.call import Classes, Dense, Given, Product, Source, TopK
from xent.core.chunks import rows_per_chunk, tile_shape

__all__ = ["Computed", "Logits", "Stored", "at_once", "fold_tiles", "in_one_part"]

_WORKSPACE, _WORKSPACE_TOP_K, _WORKSPACE_CPU = 1280 * 2**20, 800 * 2**20, 128 * 2**20  # bytes, of divergences
_FEWEST_ROWS = 256


class Stored:
    """Given logits (..., C), and their gradient. All rows are one part, unless a teacher's logits are computed."""

    tiles = False
    """Whether logits are folded from tiles, or from registers, and are never stored."""
    skips = False
    """Whether ignored rows may be left out."""
    overlaps = False
    """Whether the sums of a part are gathered while the next part is computed: two parts exist at one time."""

    def __init__(self, setting: Setting, steps: Steps, needs_gradient: bool, reuse: bool) -> None:
        """`needs_gradient`: gradients are computed; `reuse`: over given logits."""
        self._setting, self._steps, self.needs_gradient = setting, steps, needs_gradient
        target = setting.call.target
        self._teacher = Logits(target.source, setting) if isinstance(target, Dense) else None
        self.step = self._open(setting.call.source, reuse)

    def _open(self, source: Any, reuse: bool) -> int:
        """Prepare the logits and their gradient. Return the rows of a part."""
        logits, width = source.logits, self._setting.width
        self._gradients = None if not self.needs_gradient else logits if reuse else gradient_like(logits)
        self._logits, self._grad = logits, self._gradients
        if width < logits.shape[-1]:
            self._logits = logits[..., :width]
            if self._gradients is not None:
                self._grad = self._gradients[..., :width]
                self._gradients[..., width:] = 0
        size = self._teacher.bytes_per_row if self._teacher else 0
        return (
            _part_rows(self._setting, size, 1, _workspace(self._setting, size)) if size else max(self._setting.count, 1)
        )

    def start(self, schedule: Schedule) -> None:
        """Receive the schedule."""

    def load(self, part: Part) -> Loaded:
        """Return the part."""
        return Loaded(part)

    def blocks(self, loaded: Loaded, writes: bool = True) -> Iterator[Block]:
        """Yield the rows of a part in blocks that the steps take. `writes`: their gradient is computed now.

        A rank without classes has empty rows.
        """
        part, grad, teacher = loaded.part, self._grad if writes else None, self._teacher
        if not self._setting.width:
            empty = self._logits.new_empty(part.stop - part.start, 0)
            yield Block(empty, teacher=empty)
        elif teacher is None:
            yield Block(self._logits, grad=grad)
        else:
            for first, logits, place in logit_blocks(self._logits, grad, part.start, part.stop):
                start = first - part.start
                of_teacher = teacher.block(part, start, start + len(logits))
                yield Block(logits, start, 0, place, None, of_teacher)

    def fold(self, loaded: Loaded, sums: Tensor) -> None:
        """Fold the logits of a part."""
        for block in self.blocks(loaded, False):
            rows = block.logits.shape[:-1].numel()
            self._steps.fold(block, loaded.part, sums[:, block.start : block.start + rows], False)

    def differentiate(self, loaded: Loaded, coefficients: Coefficients) -> None:
        """Write the gradient of a part's logits."""
        for block in self.blocks(loaded) if self._setting.width else ():
            self._steps.gradient(block, loaded.part, coefficients)

    def add(self, loaded: Loaded) -> None:
        """Add the gradient of a part's logits to those of the leaves. That of given logits is already in its place."""

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the leaves (logits; or input, weight and bias), None where not needed."""
        return [self._gradients]


class Computed(Stored):
    """Logits (R, C) of hidden states and a classifier, part by part, and the gradients of both.

    The gradient of a part's logits is in their memory if it has their dtype.
    """

    def _open(self, source: Any, reuse: bool) -> int:
        setting = self._setting
        target, shards, compute = setting.call.target, setting.call.shards, setting.compute
        source = self._gathered(source)
        self._classifier = Classifier(source, setting.width, setting.needs)
        is_divergence = isinstance(target, (Dense, TopK))
        # On CUDA a product with a float32 result costs no more. With gradients, float32 logits would take much memory,
        # and the log-sum-exp of a row must be that of the logits that its gradient is computed from.
        only_forward, on_cuda = not (self.needs_gradient or any(setting.needs)), setting.device.type == "cuda"
        rounds = not (exact(setting.call) or is_divergence or (on_cuda and shards is not None and only_forward))
        self._dtype = compute if rounds else wide(compute)
        self._overlays = is_divergence and self._steps.overlays and self._dtype != compute
        self.tiles = self._steps.tiles and not self.needs_gradient and shards is None and isinstance(target, Classes)
        self.tiles = self.tiles and self._classifier.quantized is None and "rank" not in setting.call.options.stats
        self.skips = not self.tiles
        self._rooms: dict[int | str, Tensor] = {}
        self._turn = 0
        return max(setting.count, 1) if self.tiles else self._rows_of_part(is_divergence)

    def _gathered(self, source: Product) -> Product:
        """Set the product and its gradients. Return it with the hidden states of all tokens, also of other ranks."""
        shards = self._setting.call.shards
        self._product, self._tokens = source, None
        self._arriving: Any = None
        self._gradients: list[Any] = [None, None, None]
        if shards is None:
            return source
        from xent.backends.torch.shards.collectives import tokens_of

        self._tokens = tokens_of(shards, tuple(source.input.shape), self._setting.count)
        return source._replace(input=self._tokens.gathered(source.input.to(self._setting.compute)))

    def _rows_of_part(self, is_divergence: bool) -> int:
        setting, columns, workspace = self._setting, self._classifier.columns, self._product.workspace
        compute, shards, size = setting.compute, setting.call.shards, self._dtype.itemsize
        if self._dtype != compute and self.needs_gradient and not self._overlays:
            size += compute.itemsize
        if shards is not None or is_divergence:  # the same on every rank
            columns = _most_columns(setting, columns)
        if is_divergence:
            more = self._teacher.bytes_per_row if self._teacher else 0
            return _part_rows(setting, columns * size + more, 1, _workspace(setting, columns * size + more, workspace))
        if shards is None and workspace is None and setting.device.type != "cpu":
            # With wider logits a part has fewer rows, so that it takes no more memory than in the compute dtype.
            columns = columns * size // compute.itemsize
        rows = _part_rows(setting, columns, size, workspace)
        self.overlaps = shards is not None and setting.upstream is None and rows < setting.count
        return _part_rows(setting, columns, size + self._dtype.itemsize, workspace) if self.overlaps else rows

    def start(self, schedule: Schedule) -> None:
        """Receive the schedule, and allocate the gradients."""
        self._schedule, source, needs = schedule, self._classifier, self._setting.needs
        if not self.needs_gradient:
            return
        hidden = source.hidden
        self._gradients = [
            hidden.new_empty(hidden.shape, dtype=kept_dtype(hidden.dtype)) if needs[0] else None,
            ProductSum(source.padded, self._product.weight.dtype, schedule.chunks) if needs[1] else None,
            torch.zeros(source.columns, dtype=wide(source.compute), device=hidden.device) if needs[2] else None,
        ]

    def load(self, part: Part) -> Loaded:
        """Gather the hidden states of a part. Its logits are computed when they are needed."""
        return self._steps.select(self._classifier, part)

    def _room(self, name: int | str, part: Part, dtype: torch.dtype) -> Tensor:
        """Return memory (R, columns) for a part, the same for each part."""
        if name not in self._rooms:
            shape = self._schedule.rows, self._classifier.columns
            self._rooms[name] = torch.empty(shape, dtype=dtype, device=self._setting.device)
        return self._rooms[name][: part.stop - part.start]

    def blocks(self, loaded: Loaded, writes: bool = True) -> Iterator[Block]:
        """Yield all rows of a part in one block."""
        part, width, compute = loaded.part, self._setting.width, self._setting.compute
        logits = loaded.logits
        if logits is None:
            logits = loaded.logits = self._room(self._turn, part, self._dtype)
            self._turn = 1 - self._turn if self.overlaps else 0
            self._classifier.write_logits(loaded.hidden, logits)
        grad = None
        if self.needs_gradient:
            if self._dtype == compute:
                loaded.grad = logits
            elif self._overlays:
                loaded.grad = logits.view(compute)[:, self._classifier.columns :]
            else:
                loaded.grad = self._room("grad", part, compute)
            grad = loaded.grad[:, :width]
        teacher = None if self._teacher is None else self._teacher.block(part, 0, part.stop - part.start)
        yield Block(logits[:, :width], 0, 0, grad, loaded.target_logits, teacher, loaded.input_checks)

    def fold(self, loaded: Loaded, sums: Tensor) -> None:
        """Fold the logits of a part: from registers, from tiles that are overwritten, or from memory."""
        steps, source = self._steps, self._classifier
        if not self.tiles:
            super().fold(loaded, sums)
        elif not steps.fold_product(source, loaded, sums):
            dtype = self._dtype if any(self._setting.needs) else wide(source.compute)
            fold_tiles(steps, source, loaded, sums, dtype, self._product.workspace)

    def differentiate(self, loaded: Loaded, coefficients: Coefficients) -> None:
        """Write the gradient of a part's logits, from registers or from logits in memory."""
        if loaded.logits is None and self._classifier.quantized is None:
            compute = self._setting.compute  # if logits are stored after all, they may have the same memory
            loaded.grad = self._room(self._turn if self._dtype == compute else "grad", loaded.part, compute)
            if self._steps.gradient_product(self._classifier, loaded, coefficients, loaded.grad):
                return
        super().differentiate(loaded, coefficients)

    def add(self, loaded: Loaded) -> None:
        """Multiply the gradient of a part's logits into the gradients of hidden states and classifier."""
        part, grad, (of_input, of_weight, of_bias) = loaded.part, loaded.grad, self._gradients
        if grad is None:
            return
        if grad.shape[1] > self._setting.width:  # NaN if a row's hidden states are NaN, or logits
            grad[:, self._setting.width :] = 0
        if of_input is not None:
            if part.rows is None and of_input.dtype == grad.dtype:
                self._classifier.times(grad, of_input[part.start : part.stop])
            else:
                part.put(self._classifier.times(grad), of_input)
        if part.last:
            self._send()
        if of_weight is not None:
            of_weight.add(grad.t(), loaded.trained)
        if of_bias is not None:
            of_bias += grad.sum(0, dtype=of_bias.dtype)

    def _send(self) -> None:
        """Zero the gradient of skipped hidden states, and start the sum of their gradient over ranks."""
        of_input, left_out = self._gradients[0], self._schedule.left_out
        if of_input is not None and self._arriving is None:
            if left_out is not None:
                of_input.index_fill_(0, left_out, 0)
            self._arriving = of_input if self._tokens is None else self._tokens.summed(of_input)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients, with zeros for the padding of a shard."""
        self._send()
        of_input, source = self._arriving, self._product
        _, of_weight, of_bias = self._gradients
        if of_input is not None:
            of_input = (of_input if self._tokens is None else self._tokens.own(of_input.wait())).reshape(
                source.input.shape
            )
        return [
            of_input,
            None if of_weight is None else self._fitted(of_weight.result()),
            None if of_bias is None else self._fitted(of_bias).to(kept_dtype(source.bias.dtype)),
        ]

    def _fitted(self, gradient: Tensor) -> Tensor:
        """Return the first C rows, with zeros up to the rows of the given classifier."""
        classes, rows = self._setting.width, self._product.weight.shape[0]
        more = () if rows == classes else (gradient.new_zeros(rows - classes, *gradient.shape[1:]),)
        return torch.cat((gradient[:classes], *more)) if more else span(gradient, 0, classes)


class _Whole(NamedTuple):
    """The factors of a product that is computed at once, for `Steps.select`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    compute: torch.dtype
    needs: tuple[bool, ...]

    def select(self, part: Part) -> Tensor:
        """Return all hidden states in the compute dtype."""
        return self.hidden


def in_one_part(setting: Setting, steps: Steps) -> bool:
    """Return whether `at_once` serves a call with a product: all factors have one dtype, and the rows are one part."""
    source: Any = setting.call.source
    compute = setting.compute
    if (
        setting.call.shards is not None
        or compute == torch.float16
        or not setting.forward_gradients
        or not setting.count
    ):
        return False
    if not isinstance(source.weight, Tensor) or exact(setting.call):
        return False
    if any(factor is not None and factor.dtype != compute for factor in (source.input, source.weight, source.bias)):
        return False
    columns = padded_columns(setting.width, setting.device)
    return _part_rows(setting, columns, compute.itemsize, source.workspace) >= setting.count


def at_once(setting: Setting, steps: Steps) -> list[Tensor | None]:
    """Compute the rows of a product in one part, and return the gradients of the leaves.

    This is `Computed` without what several parts, shards and conversions need.
    """
    source: Any = setting.call.source
    needs, compute, width = setting.needs, setting.compute, setting.width
    weight, bias, hidden = source.weight, source.bias, source.input
    if hidden.dim() != 2:
        hidden = hidden.reshape(-1, hidden.shape[-1])
    part = Part(0, setting.count)
    loaded = steps.select(_Whole(hidden, weight, bias, compute, needs), part)
    missing = padded_columns(width, setting.device) - width
    if missing:
        weight = torch.cat((weight, weight.new_zeros(missing, weight.shape[1])))
        bias = None if bias is None else torch.cat((bias, bias.new_zeros(missing)))
    room = torch.empty(setting.count, width + missing, dtype=compute, device=setting.device)
    if bias is None:
        torch.mm(loaded.hidden, weight.t(), out=room)
    else:
        torch.addmm(bias, loaded.hidden, weight.t(), out=room)
    logits = room[:, :width] if missing else room
    steps.whole_rows(Block(logits, 0, 0, logits, loaded.target_logits), part, None)
    if missing and not (needs[1] and loaded.hidden is loaded.trained):
        room[:, width:] = 0  # it is NaN if the hidden states of a row without a gradient are
    of_input = torch.mm(room, weight) if needs[0] else None
    if of_input is not None and source.input.dim() != 2:
        of_input = of_input.view(source.input.shape)
    of_weight = torch.mm(room.t(), loaded.trained) if needs[1] else None
    of_bias = room.sum(0, dtype=wide(compute)).to(compute) if needs[2] else None
    if missing:
        of_weight, of_bias = (None if grad is None else grad[:width] for grad in (of_weight, of_bias))
    return [of_input, of_weight, of_bias]


class Logits:
    """The logits (R, V) of a source: stored, or computed in float32 (float64) part by part."""

    def __init__(self, source: Source, setting: Setting) -> None:
        self.bytes_per_row = 0
        self._stored = RowView(source.logits) if isinstance(source, Given) else None
        if isinstance(source, Product):
            self._classifier = Classifier(source, setting.width)
            self._dtype = wide(self._classifier.compute)
            self.bytes_per_row = _most_columns(setting, self._classifier.columns) * self._dtype.itemsize
        self._part: Part | None = None
        self._room = torch.empty(0)

    def block(self, part: Part, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a part, with contiguous classes."""
        if self._stored is not None:
            stored = self._stored[index_of(part, start, stop)]
            return stored if stored.shape[1] == 1 or stored.stride(1) == 1 else stored.contiguous()
        if self._part is not part:
            source, rows = self._classifier, part.stop - part.start
            if self._part is None:  # the first part is the largest
                self._room = torch.empty(rows, source.columns, dtype=self._dtype, device=source.hidden.device)
            source.write_logits(source.select(part), self._room[:rows])
            self._part = part
        return self._room[start:stop, : self._classifier.classes]


def _most_columns(setting: Setting, columns: int) -> int:
    """Return the columns of the logits of a rank: in shards a number that is the same on every rank."""
    shards = setting.call.shards
    return columns if shards is None else padded_columns(-(-setting.vocabulary // shards.group.size()), setting.device)


def _workspace(setting: Setting, size: int, requested: int | None = None) -> int:
    """Return the bytes of the logits of a divergence whose rows take `size` bytes."""
    largest = _WORKSPACE_TOP_K if isinstance(setting.call.target, TopK) else _WORKSPACE
    return requested or max(_WORKSPACE_CPU if setting.device.type == "cpu" else largest, _FEWEST_ROWS * size)


def _part_rows(setting: Setting, columns: int, size: int, workspace: int | None) -> int:
    """Return the rows of a part whose logits have `columns` columns of `size` bytes."""
    source, device = setting.call.source, setting.device
    rounds = False
    if isinstance(source, Product):
        rounds = setting.needs[1] and rounds_sums(setting.compute, source.weight.dtype, device)
    return rows_per_chunk(setting.count, columns, size, workspace, device.type, rounds)


def fold_tiles(
    steps: Steps, source: Classifier, loaded: Loaded, sums: Tensor, dtype: torch.dtype, workspace: int | None
) -> None:
    """Write all sums of a part from tiles of logits, which are overwritten."""
    hidden, of_targets = loaded.hidden, loaded.target_logits
    rows, tile = tile_shape(len(hidden), source.classes, dtype.itemsize, workspace)
    room = torch.empty(rows * tile, dtype=dtype, device=hidden.device)
    for start in range(0, len(hidden), rows):
        row_slice = slice(start, min(start + rows, len(hidden)))
        targets = None if of_targets is None else of_targets[row_slice]
        for first in range(0, source.classes, tile):
            classes = slice(first, min(first + tile, source.classes))
            shape = row_slice.stop - start, classes.stop - first
            logits = room[: shape[0] * shape[1]].view(shape)
            source.write_logits(hidden[row_slice], logits, classes)
            steps.fold(Block(logits, start, first, None, targets), loaded.part, sums[:, row_slice], first > 0)
