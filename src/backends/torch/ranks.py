"""The statistic "rank": the number of classes whose logit is larger than the target's.

The target's logit is read before the others are counted. In a vocabulary in shards one rank has it. So the loop counts
beside the steps, in logits that are all in memory, which are those that the steps see.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from xent.backends.torch.contract import COUNT_ABOVE, Block, Part, Setting
from xent.backends.torch.memory import block_rows, logit_blocks
from xent.backends.torch.portable.facts import Facts, index_of, masked
from xent.backends.torch.portable.rows import LogitRows
from xent.core.call import Classes

__all__ = ["Ranks"]


class Ranks:
    """The ranks of the targets of a call."""

    def __init__(self, setting: Setting, kernel: str) -> None:
        """`kernel`: the backend that counts, if its kernel serves the call."""
        self._setting, self._facts, target = setting, Facts(setting), setting.call.target
        self._counts = torch.zeros(setting.count, dtype=torch.int64, device=setting.device)
        scale = setting.call.activation.logit_scale
        ordered = isinstance(target, Classes) and not isinstance(scale, Tensor) and scale > 0
        self._count = COUNT_ABOVE.get(kernel) if ordered else None

    def add(self, part: Part, logits: Tensor) -> None:
        """Count in the rows of a part, of all its logits (..., C) on this rank."""
        facts, shards, count = self._facts, self._setting.call.shards, self._count
        of_target = torch.zeros(part.stop - part.start, dtype=facts.dtype, device=logits.device)
        for place, _, rows in self._pieces(part, logits):
            of_target[place] = rows.of_target()
        if shards is not None:
            from xent.backends.torch.shards.collectives import add_up  # needs torch.distributed

            add_up(of_target, shards.group).wait()
        for place, piece, rows in self._pieces(part, logits):
            limit = of_target[place]
            above = rows.count_above(limit) if count is None else count(piece, limit)
            self._counts[index_of(part, place.start, place.stop)] = above

    def _pieces(self, part: Part, logits: Tensor) -> Iterator[tuple[slice, Tensor, LogitRows]]:
        """Yield rows of a part with their places in it, in pieces that fit into the caches where PyTorch counts."""
        step = block_rows(logits, self._facts.dtype) if self._count is None else max(self._setting.count, 1)
        for first, block, _ in logit_blocks(logits, None) if logits.numel() else ():
            for start in range(first, first + len(block), step):
                piece = block[start - first : start - first + step]
                place = slice(start, start + len(piece))
                rows = self._facts.rows(index_of(part, place.start, place.stop))
                yield place, piece, LogitRows(rows, Block(piece))

    def result(self) -> Tensor:
        """Return the ranks (N,) over all classes; -1 for rows without a target."""
        if self._setting.call.shards is not None:
            from xent.backends.torch.shards.collectives import add_up

            add_up(self._counts, self._setting.call.shards.group).wait()
        return masked(masked(self._counts, self._facts.ignored, -1), self._facts.invalid, -1)
