"""`PortableSteps`: the steps of a call's rows in PyTorch's own operations, in blocks that fit into CPU caches."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import STEPS, Block, Part, Setting, Taken, columns, wide
from xent.backends.torch.memory import cast
from xent.backends.torch.portable.divergence import Both, Divergence
from xent.backends.torch.portable.facts import Facts, at, index_of
from xent.backends.torch.portable.finish import Finished
from xent.backends.torch.portable.results import Results
from xent.backends.torch.portable.rows import LogitRows
from xent.backends.torch.portable.sums import merge, pack
from xent.backends.torch.portable.workspace import Workspace
from xent.core.call import Dense, TopK
from xent.core.chunks import rows_per_block

__all__ = ["PortableSteps"]

_ENTRIES = 2**18  # of a block of supports


class PortableSteps:
    """See `xent.backends.torch.contract.Steps`."""

    takes_any_strides = False
    tiles = False
    overlays = False

    def __init__(self, setting: Setting) -> None:
        call = setting.call
        self._setting, self._facts = setting, Facts.of(setting)
        self.deferred = self._facts.deferred
        self.saves = not isinstance(call.target, (Dense, TopK))
        self.fuses = call.shards is None
        self._names = columns(setting) if self.saves else ()
        self._space = Workspace(setting, self._facts, self._names)
        self._divergence = None if self.saves else Divergence(setting, self._facts)
        self._met: tuple[Tensor, Both] | None = None
        self._results = Results(setting, self._facts)

    def partition(self, several: bool) -> tuple[Tensor | None, int | Tensor]:
        """Move the rows to compute to the front."""
        count, upstream = self._setting.count, self._setting.upstream
        idle = self._facts.skippable(bool(self._setting.call.options.stats) and upstream is None)
        if idle is None:
            return None, count
        if idle.device.type == "cpu":
            number = count - int(idle.sum())
            return (None, count) if number == count else (idle.argsort(stable=True), number)
        if not several or idle.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None, count
        return idle.argsort(stable=True), (~idle).sum()

    def learn(self, number: int) -> None:
        """Do nothing: a part knows its rows."""

    def take(self, source: Any, part: Part) -> Taken:
        """Gather the hidden states of a part, and the logits of its targets if the compute dtype is 16-bit."""
        facts, setting = self._facts, self._setting
        index = index_of(part, 0, part.stop - part.start, setting.count)
        hidden = cast(at(source.hidden, index), source.compute)
        dead = at(facts.dead, index)
        trained = hidden if dead is None else hidden.masked_fill(dead[:, None], 0)
        found = None
        if facts.target is not None and source.compute.itemsize == 2 and setting.width:
            local = at(facts.target, index) - setting.first
            place = local.clamp(0, setting.width - 1)
            found = (hidden.float() * source.weight[place].float()).sum(-1)
            found = found if source.bias is None else found + source.bias[place]
            if setting.width < setting.vocabulary:
                found = found.masked_fill(local != place, 0)
        return Taken(hidden, trained, found)

    def whole_rows(self, block: Block, part: Part, saved: Tensor | None) -> None:
        """Fold and finish rows, and write their gradients from the exponentials of the fold."""
        for piece, rows in self._pieces(block):
            index = index_of(part, rows.start, rows.stop, self._setting.count)
            if self._divergence is not None:
                found = self._divergence.rows(piece, index)
                if self._setting.upstream is None:
                    self._results.record(found, part, rows)
                continue
            logits = self._rows(piece, index, piece.grad)
            sums = logits.fold()
            finished = Finished(self._setting, self._facts, sums, index)
            self._results.record(finished.results(), part, rows)
            if saved is not None:
                saved[:, slice(None) if index is None else index] = pack(self._names, sums)
            if piece.grad is not None:
                logits.gradient(finished.coefficients())

    def fold(self, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
        """Write the sums (K, R) of a block, or merge them with earlier ones."""
        for piece, rows in self._pieces(block):
            index = index_of(part, rows.start, rows.stop, self._setting.count)
            if self._divergence is None:
                made = pack(self._names, self._rows(piece, index, None).fold())
            elif self._met is None:
                made = self._divergence.fold(piece, index)
            else:
                made = self._divergence.refold(piece, self._met[1].of(rows))
            place = sums[:, rows.start - block.start : rows.stop - block.start]
            if adds:
                made = pack(self._names, merge(self._names, torch.stack([place, made])))
            place.copy_(made)

    def meet(self, sums: Tensor) -> None:
        """Merge both normalizers of the rows of a part."""
        assert self._divergence is not None
        self._met = sums, self._divergence.both(sums)

    def fold_product(self, source: Any, taken: Taken, part: Part, sums: Tensor) -> bool:
        """Return False: logits are stored."""
        return False

    def gradient_product(self, source: Any, taken: Taken, part: Part, coefficients: Any, grad: Tensor) -> bool:
        """Return False: logits are stored."""
        return False

    def finish(self, sums: Tensor, part: Part, wanted: bool, saved: Tensor | None) -> Any:
        """Merge the sums of all ranks (ranks, K, R), and record results."""
        index = index_of(part, 0, part.stop - part.start, self._setting.count)
        if self._divergence is not None:
            first, both = (sums, None) if self._met is None else self._met
            second, self._met = None if self._met is None else sums, None
            found, coefficients = self._divergence.finish(first, both, second, index)
            if self._setting.upstream is None:
                self._results.record(found, part, slice(0, part.stop - part.start))
            return coefficients if wanted else None
        merged = merge(self._names, sums)
        finished = Finished(self._setting, self._facts, merged, index)
        if self._setting.upstream is None:
            self._results.record(finished.results(), part, slice(0, part.stop - part.start))
        if saved is not None:
            saved[:, slice(None) if index is None else index] = pack(self._names, merged)
        return finished.coefficients() if wanted else None

    def gradient(self, block: Block, part: Part, coefficients: Any) -> None:
        """Write the gradient of a block's logits."""
        for piece, rows in self._pieces(block):
            index = index_of(part, rows.start, rows.stop, self._setting.count)
            if piece.grad is None or not piece.logits.shape[1]:
                continue
            if self._divergence is not None:
                self._divergence.gradient(piece, index, coefficients.of(rows))
            else:
                self._rows(piece, index, piece.grad).gradient(coefficients.of(rows))

    def results(self) -> list[Tensor]:
        """Return the loss and the statistics."""
        return self._results.values()

    def _rows(self, piece: Block, index: Any, grad: Tensor | None) -> LogitRows:
        dtype = wide(self._setting.compute)
        return LogitRows(self._space, piece.logits, index, piece.first, piece.target_logits, grad, dtype)

    def _pieces(self, block: Block) -> Iterator[tuple[Block, slice]]:
        """Yield a block in pieces that fit into the caches, and their rows relative to the part."""
        count, width = block.logits.shape
        support, start = self._facts.support, block.start
        if support is not None:
            step = max(_ENTRIES // support.longest, 1)
        else:
            passes = 1 if self._divergence is None else self._divergence.passes
            size = wide(self._setting.compute).itemsize * passes
            step = rows_per_block(max(width, 1), size, block.logits.device.type, torch.get_num_threads())
        if count <= step:
            yield block, slice(start, start + count)
            return
        for first in range(0, count, step):
            some = slice(first, min(first + step, count))
            cut = [None if one is None else one[some] for one in (block.grad, block.target_logits, block.teacher)]
            yield Block(block.logits[some], start + first, block.first, *cut), slice(start + first, start + some.stop)


STEPS["torch"] = PortableSteps
