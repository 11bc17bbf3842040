"""`PortableSteps`: the steps of a call's rows in PyTorch's own operations, in blocks that fit into CPU caches."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import STEPS, Block, Part, Setting, Steps, Taken
from xent.backends.torch.memory import cast
from xent.backends.torch.portable.divergence import SECOND, FinishedDivergence, TeacherRows
from xent.backends.torch.portable.facts import Facts, Index, at, index_of
from xent.backends.torch.portable.finish import Finished, Results, merge, pack
from xent.backends.torch.portable.rows import LogitRows, Workspace
from xent.core.call import Dense, TopK
from xent.core.chunks import rows_per_block

__all__ = ["PortableSteps"]

_ENTRIES = 2**18  # of a block of supports
_ARRAYS = 6  # of a block's size, which exist at one time in a divergence


class PortableSteps(Steps):
    """See `xent.backends.torch.contract.Steps`."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._facts = setting, Facts(setting)
        self.deferred, self.fuses = self._facts.deferred, setting.call.shards is None
        self._space, self._results = Workspace(setting, self._facts), Results(setting, self._facts)
        self.saves = not isinstance(setting.call.target, (Dense, TopK))
        self._rows: Any = LogitRows if self.saves else TeacherRows
        self._finished: Any = Finished if self.saves else FinishedDivergence
        self.met: dict[str, Tensor] = {}
        """The sums of the first of two folds."""

    def partition(self, several: bool) -> tuple[Tensor | None, int | Tensor]:
        """Move the rows to compute to the front."""
        count, facts = self._setting.count, self._facts
        # With statistics every row with a target is computed, even if its loss and gradient are 0.
        stats = bool(self._setting.call.options.stats) and self._setting.upstream is None
        idle = facts.ignored if stats or facts.dead is None else facts.dead
        if idle is None:
            return None, count
        if idle.is_cpu:
            number = count - int(idle.sum())
            return (None, count) if number == count else (idle.argsort(stable=True), number)
        if not several or not idle.is_cuda or torch.cuda.is_current_stream_capturing():
            return None, count
        return idle.argsort(stable=True), (~idle).sum()

    def take(self, source: Any, part: Part) -> Taken:
        """Gather the hidden states of a part, and the logits of its targets if the compute dtype is 16-bit."""
        facts, setting, index = self._facts, self._setting, self._index(part)
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
        for piece, _, index in self._pieces(block, part):
            rows = self._rows(self._space, piece, index)
            sums = rows.fold()
            if isinstance(self._setting.call.target, Dense):
                sums |= rows.refold(sums)
            finished = self._finish(sums, index, saved)
            if piece.grad is not None:
                rows.gradient(finished.coefficients())

    def fold(self, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
        """Write the sums (K, R) of a block."""
        for piece, rows, index in self._pieces(block._replace(grad=None), part):
            some = self._rows(self._space, piece, index)
            found = some.refold(_of(self.met, rows)) if self.met else some.fold()
            sums[:, rows.start - block.start : rows.stop - block.start] = pack(self._packed, found)

    def meet(self, sums: Tensor) -> None:
        """Merge both normalizers of the rows of a part."""
        self.met = merge(self._packed, sums)

    def finish(self, sums: Tensor, part: Part, wanted: bool, saved: Tensor | None) -> Any:
        """Merge the sums of all ranks (ranks, K, R), and record results."""
        merged, self.met = merge(self._packed, sums) | self.met, {}
        finished = self._finish(merged, self._index(part), saved)
        return finished.coefficients() if wanted else None

    def gradient(self, block: Block, part: Part, coefficients: Any) -> None:
        """Write the gradient of a block's logits."""
        for piece, rows, index in self._pieces(block, part):
            if piece.grad is not None and piece.logits.shape[1]:
                self._rows(self._space, piece, index).gradient(_of(coefficients, rows))

    def results(self) -> list[Tensor]:
        """Return the loss and the statistics."""
        return self._results.values()

    @property
    def _packed(self) -> tuple[str, ...]:
        """The names of the sums of the current fold."""
        return SECOND if self.met else self._space.names

    def _finish(self, sums: dict[str, Tensor], index: Index, saved: Tensor | None) -> Any:
        """Record the results of rows in a forward pass, and save their sums."""
        finished = self._finished(self._setting, self._facts, sums, index)
        if self._setting.upstream is None:
            self._results.record(finished.results(), index)
        if saved is not None:
            saved[:, slice(None) if index is None else index] = pack(self._space.names, sums)
        return finished

    def _index(self, part: Part) -> Index:
        """Return the rows of a part."""
        return index_of(part, 0, part.stop - part.start, self._setting.count)

    def _pieces(self, block: Block, part: Part) -> Iterator[tuple[Block, slice, Index]]:
        """Yield a block in pieces that fit into the caches, and their rows relative to the part and in the call."""
        (count, width), support, start = block.logits.shape, self._facts.support, block.start
        if support is not None:
            step = max(_ENTRIES // support.longest, 1)
        else:
            size = self._space.dtype.itemsize * (1 if self.saves else _ARRAYS)
            step = rows_per_block(max(width, 1), size, block.logits.device.type, torch.get_num_threads())
        for first in range(0, count, step) if count > step else (0,):
            last, piece = min(first + step, count), block
            if last - first < count:
                cut = [None if one is None else one[first:last] for one in block[3:]]
                piece = Block(block.logits[first:last], start + first, 0, *cut)
            rows = slice(start + first, start + last)
            yield piece, rows, index_of(part, rows.start, rows.stop, self._setting.count)


def _of(coefficients: Any, rows: slice) -> Any:
    """Return the coefficients of some rows."""
    if isinstance(coefficients, dict):
        return {name: one[rows] for name, one in coefficients.items()}
    return type(coefficients)(*[None if one is None else one[rows] for one in coefficients])


STEPS["torch"] = PortableSteps
