"""`PortableSteps`: the steps of a call's rows in PyTorch's own operations, in blocks that fit into CPU caches."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.contract import STEPS, Block, Part, Setting, Steps, Taken
from xent.backends.torch.portable.divergence import SECOND, TeacherRows, finish_divergence
from xent.backends.torch.portable.facts import Facts, Index, at, index_of
from xent.backends.torch.portable.finish import finish, is_largest, merge, pack, record, result
from xent.backends.torch.portable.rows import LogitRows
from xent.core.call import Dense, TopK
from xent.core.chunks import rows_per_block

__all__ = ["PortableSteps"]

_ARRAYS = 6  # of a block's size, which exist at one time in a divergence
_OF_SUPPORT = 8  # the same of a block of supports


class PortableSteps(Steps):
    """See `xent.backends.torch.contract.Steps`."""

    def __init__(self, setting: Setting) -> None:
        facts = self._facts = Facts(setting)
        self._setting = setting
        self.deferred, self.fuses = facts.deferred, setting.call.shards is None
        self.saves = not isinstance(setting.call.target, (Dense, TopK))
        self._rows: Any = LogitRows if self.saves else TeacherRows
        self.met: dict[str, Tensor] = {}
        """The sums of the first of two folds."""

    def idle(self) -> Tensor | None:
        """Return the rows to leave out. With statistics every row with a target is computed."""
        facts, stats = self._facts, bool(self._setting.call.options.stats) and self._setting.upstream is None
        return facts.ignored if stats else facts.dead

    def take(self, source: Any, part: Part) -> Taken:
        """Gather the hidden states of a part, and the logits of its targets if the compute dtype is 16-bit."""
        facts, setting, index = self._facts, self._setting, part.indices
        hidden = source.take(part)
        dead = at(facts.dead, index)
        trained = hidden if dead is None else hidden.masked_fill(dead[:, None], 0)
        found = None
        if facts.target is not None and source.compute.itemsize == 2 and setting.width:
            local = at(facts.target, index) - setting.first
            place = local.clamp(0, setting.width - 1)
            found = (hidden.float() * source.weight[place].float()).sum(-1)
            found = found if source.bias is None else found + source.bias[place]
            found = found.masked_fill(local != place, 0)
        return Taken(hidden, trained, found)

    def whole_rows(self, block: Block, part: Part, saved: Tensor | None) -> None:
        """Fold and finish rows, and write their gradients from the exponentials of the fold."""
        for piece, _, index in self._pieces(block, part):
            rows = self._rows(self._facts, piece, index)
            sums = rows.fold()
            if isinstance(self._setting.call.target, Dense):
                sums |= rows.refold(sums)
            made = self._finish(sums, index, piece.grad is not None, saved)
            if piece.grad is not None:
                rows.gradient(made)

    def fold(self, block: Block, part: Part, sums: Tensor, adds: bool) -> None:
        """Write the sums (K, R) of a block."""
        width = block.logits.shape[1]
        for piece, rows, index in self._pieces(block._replace(grad=None), part):
            if width:
                some = self._rows(self._facts, piece, index)
                found = some.refold(_of(self.met, rows)) if self.met else some.fold()
            else:
                least, like = torch.finfo(sums.dtype).min, sums[0, : len(piece.logits)]
                found = {name: torch.full_like(like, least if is_largest(name) else 0) for name in self._packed}
                found |= {"id": at(self._facts.ids, index)}
            sums[:, rows.start - block.start : rows.stop - block.start] = pack(self._packed, found)

    def meet(self, sums: Tensor) -> None:
        """Merge both normalizers of the rows of a part."""
        self.met = merge(self._packed, sums)

    def finish(self, sums: Tensor, part: Part, wanted: bool, saved: Tensor | None) -> Any:
        """Merge the sums of all ranks (ranks, K, R), and record results."""
        merged, self.met = merge(self._packed, sums) | self.met, {}
        return self._finish(merged, part.indices, wanted, saved)

    def gradient(self, block: Block, part: Part, coefficients: Any) -> None:
        """Write the gradient of a block's logits."""
        for piece, rows, index in self._pieces(block, part):
            if piece.grad is not None and piece.logits.shape[1]:
                self._rows(self._facts, piece, index).gradient(_of(coefficients, rows))

    def results(self) -> list[Tensor]:
        """Return the loss and the statistics."""
        return [result(self._facts, name) for name in ("loss", *self._setting.call.options.stats)]

    @property
    def _packed(self) -> tuple[str, ...]:
        """The names of the sums of the current fold."""
        return SECOND if self.met else self._facts.names

    def _finish(self, sums: dict[str, Tensor], index: Index, wanted: bool, saved: Tensor | None) -> dict[str, Any]:
        """Record the results of rows in a forward pass, save their sums, and return the gradient's coefficients."""
        results, made = (finish if self.saves else finish_divergence)(self._facts, sums, index, wanted)
        if self._setting.upstream is None:
            record(self._facts, results, index)
        if saved is not None:
            saved[:, index] = pack(self._facts.names, sums)
        return made

    def _pieces(self, block: Block, part: Part) -> Iterator[tuple[Block, slice, Index]]:
        """Yield a block in pieces that fit into the caches, and their rows relative to the part and in the call."""
        (count, width), start, size = block.logits.shape, block.start, self._facts.dtype.itemsize
        width = max(width + _OF_SUPPORT * self._facts.longest, 1) * (1 if self.saves else _ARRAYS)
        step = rows_per_block(width, size, block.logits.device.type, torch.get_num_threads())
        for first in range(0, max(count, 1), step):
            some, piece = slice(first, min(first + step, count)), block
            if step < count:
                cut = [None if one is None else one[some] for one in block[3:]]
                piece = Block(block.logits[some], start + first, 0, *cut)
            rows = slice(start + some.start, start + some.stop)
            yield piece, rows, index_of(part, rows.start, rows.stop)


def _of(coefficients: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Return the coefficients of some rows."""
    return {name: at(one, rows) for name, one in coefficients.items()}


STEPS["torch"] = PortableSteps
