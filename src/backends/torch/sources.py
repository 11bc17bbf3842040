"""The sources of logits: stored ones, or hidden states and a classifier; and the places of their gradients.

A source yields the logits of a part in blocks, and takes the gradients of these blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Part, Schedule, Setting, Steps, Taken, exact, wide
from xent.backends.torch.memory import Rows, gradient_like, logit_blocks
from xent.backends.torch.products import Classifier, Gradients, padded_columns, rounds_sums
from xent.core.call import Classes, Dense, Given, Product, Source, TopK
from xent.core.chunks import rows_per_chunk, tile_shape

__all__ = ["Computed", "Loaded", "Stored", "fold_tiles", "source_of"]

_WORKSPACE, _WORKSPACE_TOP_K, _WORKSPACE_CPU = 1280 * 2**20, 800 * 2**20, 128 * 2**20  # bytes, of divergences
_FEWEST_ROWS = 256


@dataclass(eq=False, slots=True)
class Loaded:
    """A part that is being computed."""

    part: Part
    taken: Taken | None = None
    logits: Tensor | None = None
    """(R, columns) after the product."""
    grad: Tensor | None = None
    """(R, columns), of the logits, in the compute dtype."""


def source_of(setting: Setting, steps: Steps, wanted: bool, reuse: bool) -> "Stored | Computed":
    """Return the source of a call's logits. `wanted`: gradients are computed; `reuse`: over given logits."""
    target, source = setting.call.target, setting.call.source
    teacher = _Teacher(target.source, setting) if isinstance(target, Dense) else None
    if isinstance(source, Given):
        return Stored(setting, source.logits, steps, wanted, reuse, teacher)
    return Computed(setting, source, steps, wanted, teacher)


class Stored:
    """Given logits (..., C), and their gradient. All rows are one part, unless a teacher's logits are computed."""

    overlaps = tiles = skips = False

    def __init__(
        self,
        setting: Setting,
        logits: Tensor,
        steps: Steps,
        wanted: bool,
        reuse: bool,
        teacher: "_Teacher | None",
    ) -> None:
        self._setting, self._steps, self._teacher, self.wanted = setting, steps, teacher, wanted
        self._made = None if not wanted else logits if reuse else gradient_like(logits)
        self._logits, self._grad, width = logits, self._made, setting.width
        if width < logits.shape[-1]:
            self._logits = logits[..., :width]
            if self._made is not None:
                self._grad = self._made[..., :width]
                self._made[..., width:] = 0
        self.step = max(setting.count, 1)
        if teacher is not None and teacher.bytes_per_row:
            self.step = _rows_of_divergence(setting, teacher.bytes_per_row)

    def start(self, schedule: Schedule) -> None:
        """Do nothing."""

    def load(self, part: Part) -> Loaded:
        """Return the part."""
        return Loaded(part)

    def blocks(self, loaded: Loaded, wanted: bool = True) -> Iterator[Block]:
        """Yield the rows of a part in blocks that the steps take; a gradient is copied back where it must be."""
        part, grad, teacher = loaded.part, self._grad if wanted else None, self._teacher
        if self._steps.takes_any_strides and teacher is None:
            yield Block(self._logits, grad=grad)
            return
        whole = part.stop - part.start == self._setting.count
        found: Any = logit_blocks(self._logits, grad) if whole else [(0, self._rows(part), None)]
        for start, block, room in found:
            place = torch.empty_like(block) if grad is not None and not whole else room
            of_teacher = None if teacher is None else teacher.block(part, start, start + len(block))
            yield Block(block, start, 0, place, None, of_teacher)
            if grad is not None and not whole:
                Rows(grad).put(part.start, place)

    def _rows(self, part: Part) -> Tensor:
        return Rows(self._logits).block(part.start, part.stop).contiguous()

    def fold(self, loaded: Loaded, sums: Tensor) -> None:
        """Fold all rows. A rank without classes folds empty rows."""
        part = loaded.part
        if not self._setting.width:
            empty = self._logits.new_empty(part.stop - part.start, 0)
            self._steps.fold(Block(empty, teacher=empty), part, sums, False)
            return
        for block in self.blocks(loaded, False):
            rows = block.logits.shape[:-1].numel()
            self._steps.fold(block, part, sums[:, block.start : block.start + rows], False)

    def differentiate(self, loaded: Loaded, coefficients: Any) -> None:
        """Write the gradient of all rows."""
        for block in self.blocks(loaded) if self._setting.width else ():
            self._steps.gradient(block, loaded.part, coefficients)

    def add(self, loaded: Loaded) -> None:
        """Do nothing: the gradient is in its place."""

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of the logits, or None."""
        return [self._made]


class Computed:
    """Logits (R, C) of hidden states and a classifier, part by part, and the gradients of both.

    The gradient of a part's logits is in their memory if it has their dtype.
    """

    def __init__(
        self, setting: Setting, source: Product, steps: Steps, wanted: bool, teacher: "_Teacher | None"
    ) -> None:
        self._setting, self._steps, self._teacher, self.wanted = setting, steps, teacher, wanted
        self._given, self._tokens = source, None
        target, shards, compute = setting.call.target, setting.call.shards, setting.compute
        if shards is not None:
            from xent.backends.torch.shards.collectives import tokens_of

            self._tokens = tokens_of(shards, tuple(source.input.shape), setting.count)
            source = source._replace(input=self._tokens.gathered(source.input.to(compute)))
        self._classifier = Classifier(source, setting.width, setting.needs)
        self._divides = isinstance(target, (Dense, TopK))
        # On CUDA a product with a float32 result costs no more. With gradients, float32 logits would take much memory,
        # and the log-sum-exp of a row must be that of the logits that its gradient is computed from.
        ends, on_cuda = not (wanted or any(setting.needs)), setting.device.type == "cuda"
        rounds = not (exact(setting.call) or self._divides or (on_cuda and shards is not None and ends))
        self._dtype = compute if rounds else wide(compute)
        self._overlays = self._divides and steps.overlays and self._dtype != compute
        self.tiles = steps.tiles and not wanted and shards is None and isinstance(target, Classes)
        """Whether logits are folded from tiles, or from registers, and are never stored."""
        self.skips = not self.tiles
        self.overlaps = False
        """Whether the sums of a part are gathered while the next part is computed: two parts exist at one time."""
        self.step = self._rows_of_part()
        self._rooms: dict[Any, Tensor] = {}
        self._arriving: Any = None
        self._turn = 0

    def _rows_of_part(self) -> int:
        setting, source, workspace = self._setting, self._classifier, self._given.workspace
        count, compute, shards, device = setting.count, setting.compute, setting.call.shards, setting.device
        size, columns = self._dtype.itemsize, source.columns
        if self.tiles:
            return max(count, 1)
        if self._dtype != compute and self.wanted and not self._overlays:
            size += compute.itemsize
        if shards is not None or self._divides:  # the same on every rank
            columns = _most_columns(setting, columns)
        if self._divides:
            return _rows_of_divergence(setting, columns * size + (self._teacher.bytes_per_row if self._teacher else 0))
        if shards is None and workspace is None and device.type != "cpu":
            # With wider logits a part has fewer rows, so that it takes no more memory than in the compute dtype.
            columns = columns * size // compute.itemsize
        rounds = self.wanted and setting.needs[1] and rounds_sums(compute, self._given.weight.dtype, device)
        rows = rows_per_chunk(count, columns, size, workspace, device.type, rounds)
        if shards is not None and setting.upstream is None and rows < count:
            self.overlaps = True
            size += self._dtype.itemsize
            rows = rows_per_chunk(count, columns, size, workspace, device.type, rounds)
        return rows

    def start(self, schedule: Schedule) -> None:
        """Receive the schedule."""
        self._rows = schedule.rows
        self._gradients = Gradients(self._classifier, schedule) if self.wanted else None

    def load(self, part: Part) -> Loaded:
        """Gather the hidden states of a part. Its logits are computed when they are needed."""
        return Loaded(part, self._steps.take(self._classifier, part))

    def _room(self, name: Any, part: Part, dtype: torch.dtype) -> Tensor:
        """Return memory (R, columns) for a part, the same for each part."""
        if name not in self._rooms:
            shape = self._rows, self._classifier.columns
            self._rooms[name] = torch.empty(shape, dtype=dtype, device=self._setting.device)
        return self._rooms[name][: part.stop - part.start]

    def blocks(self, loaded: Loaded) -> Iterator[Block]:
        """Yield all rows of a part in one block."""
        part, taken, width, compute = loaded.part, loaded.taken, self._setting.width, self._setting.compute
        assert taken is not None
        logits = loaded.logits
        if logits is None:
            logits = loaded.logits = self._room(self._turn, part, self._dtype)
            self._turn = 1 - self._turn if self.overlaps else 0
            self._classifier.write_logits(taken.hidden, logits)
        grad = None
        if self.wanted:
            if self._dtype == compute:
                loaded.grad = logits
            elif self._overlays:
                loaded.grad = logits.view(compute)[:, self._classifier.columns :]
            else:
                loaded.grad = self._room("grad", part, compute)
            grad = loaded.grad[:, :width]
        teacher = None if self._teacher is None else self._teacher.block(part, 0, part.stop - part.start)
        yield Block(logits[:, :width], 0, 0, grad, taken.target_logits, teacher)

    def fold(self, loaded: Loaded, sums: Tensor) -> None:
        """Fold the logits of a part: from registers, from tiles that are overwritten, or from memory."""
        steps, source, part, taken = self._steps, self._classifier, loaded.part, loaded.taken
        assert taken is not None
        if not self.tiles:
            for block in self.blocks(loaded):
                steps.fold(block, part, sums, False)
        elif not steps.fold_product(source, taken, part, sums):
            dtype = self._dtype if any(self._setting.needs) else wide(source.compute)
            fold_tiles(steps, source, taken, part, sums, dtype, self._given.workspace)

    def differentiate(self, loaded: Loaded, coefficients: Any) -> None:
        """Write the gradient of a part's logits, from registers or from logits in memory."""
        steps, part, taken = self._steps, loaded.part, loaded.taken
        assert taken is not None
        if loaded.logits is None:
            grad = self._room("grad", part, self._setting.compute)
            if steps.gradient_product(self._classifier, taken, part, coefficients, grad):
                loaded.grad = grad
                return
        for block in self.blocks(loaded):
            steps.gradient(block, part, coefficients)

    def add(self, loaded: Loaded) -> None:
        """Multiply the gradient of a part's logits into the gradients of hidden states and classifier."""
        part, taken, grad, width = loaded.part, loaded.taken, loaded.grad, self._setting.width
        if self._gradients is None:
            return
        assert taken is not None
        assert grad is not None
        if grad.shape[1] > width:
            grad[:, width:] = 0  # a row of NaN hidden states has NaN there, and an overlaid one logits
        self._gradients.add_to_input(part, grad)
        if part.last:
            self._send()
        self._gradients.add_to_classifier(part, taken.trained, grad)

    def _send(self) -> None:
        """Start the sum of the input's gradient over ranks."""
        if self._tokens is not None and self._gradients is not None and self._arriving is None:
            made = self._gradients.of_input()
            self._arriving = None if made is None else self._tokens.summed(made)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of input, weight and bias; None where not needed."""
        if self._gradients is None:
            return [None, None, None]
        self._send()
        if self._tokens is None or self._arriving is None:
            of_input = self._gradients.of_input()
        else:
            of_input = self._tokens.mine(self._arriving.land())
        shape = self._given.input.shape
        return [None if of_input is None else of_input.reshape(shape), *self._gradients.of_classifier()]


class _Teacher:
    """The logits (R, V) of a dense teacher: stored, or computed in float32 (float64) part by part."""

    def __init__(self, source: Source, setting: Setting) -> None:
        self.bytes_per_row = 0
        self._stored = Rows(source.logits) if isinstance(source, Given) else None
        if isinstance(source, Product):
            self._classifier = Classifier(source, setting.width)
            self._dtype = wide(self._classifier.compute)
            self.bytes_per_row = _most_columns(setting, self._classifier.columns) * self._dtype.itemsize
        self._made: tuple[Part, Tensor] | None = None

    def block(self, part: Part, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a part, with contiguous classes."""
        if self._stored is not None:
            if part.rows is not None:
                made = self._stored.take(part.rows[start:stop])
            else:
                made = self._stored.block(part.start + start, part.start + stop)
            return made if made.shape[1] == 1 or made.stride(1) == 1 else made.contiguous()
        if self._made is None or self._made[0] is not part:
            source, rows = self._classifier, part.stop - part.start
            room = None if self._made is None else self._made[1]
            if room is None or len(room) < rows:
                room = torch.empty(rows, source.columns, dtype=self._dtype, device=source.hidden.device)
            source.write_logits(source.take(part), room[:rows])
            self._made = part, room
        return self._made[1][start:stop, : self._classifier.classes]


def _most_columns(setting: Setting, columns: int) -> int:
    """Return the columns of the logits of a rank: in shards a number that is the same on every rank."""
    shards = setting.call.shards
    return columns if shards is None else padded_columns(-(-setting.vocabulary // shards.group.size()), setting.device)


def _rows_of_divergence(setting: Setting, size: int) -> int:
    """Return the rows of a part of a divergence whose rows take `size` bytes."""
    source, device = setting.call.source, setting.device.type
    largest = _WORKSPACE_TOP_K if isinstance(setting.call.target, TopK) else _WORKSPACE
    default = max(_WORKSPACE_CPU if device == "cpu" else largest, _FEWEST_ROWS * size)
    workspace, sums = None, False
    if isinstance(source, Product):
        workspace = source.workspace
        sums = setting.needs[1] and rounds_sums(setting.compute, source.weight.dtype, source.weight.device)
    return rows_per_chunk(setting.count, size, 1, workspace or default, device, sums)


def fold_tiles(
    steps: Steps,
    source: Classifier,
    taken: Taken,
    part: Part,
    sums: Tensor,
    dtype: torch.dtype,
    workspace: int | None,
) -> None:
    """Write all sums of a part from tiles of logits, which are overwritten."""
    rows, tile = tile_shape(len(taken.hidden), source.classes, dtype.itemsize, workspace)
    room = torch.empty(rows * tile, dtype=dtype, device=taken.hidden.device)
    for start in range(0, len(taken.hidden), rows):
        some = slice(start, min(start + rows, len(taken.hidden)))
        targets = None if taken.target_logits is None else taken.target_logits[some]
        for first in range(0, source.classes, tile):
            classes = slice(first, min(first + tile, source.classes))
            shape = some.stop - start, classes.stop - first
            logits = room[: shape[0] * shape[1]].view(shape)
            source.write_logits(taken.hidden[some], logits, classes)
            steps.fold(Block(logits, start, first, None, targets), part, sums[:, some], first > 0)
