"""The statistic "rank": the number of classes whose logit is larger than the target's.

The target's logit is read before the others are counted. In a vocabulary in shards one rank has it. So the loop counts
beside the steps, in logits that are all in memory, which are those that the steps see.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from xent.backends.torch.contract import Block, Part, Setting
from xent.backends.torch.memory import block_rows, logit_blocks
from xent.backends.torch.portable.facts import Facts, index_of, masked
from xent.backends.torch.portable.rows import LogitRows

__all__ = ["Ranks"]


class Ranks:
    """The ranks of the targets of a call."""

    def __init__(self, setting: Setting, kernel: str) -> None:
        """`kernel`: the backend that counts."""
        self._setting, self._facts, self._kernel = setting, Facts(setting), kernel
        self._counts = torch.zeros(setting.count, dtype=torch.int64, device=setting.device)

    def add(self, part: Part, logits: Tensor) -> None:
        """Count in the rows of a part, of all its logits (..., C) on this rank."""
        facts, shards = self._facts, self._setting.call.shards
        of_target = torch.zeros(part.stop - part.start, dtype=facts.dtype, device=logits.device)
        for place, rows in self._pieces(part, logits):
            of_target[place] = rows.of_target()
        if shards is not None:
            from xent.backends.torch.shards.collectives import add_up  # needs torch.distributed

            add_up(of_target, shards.group).wait()
        for place, rows in self._pieces(part, logits):
            self._counts[index_of(part, place.start, place.stop)] = rows.count_above(of_target[place], self._kernel)

    def _pieces(self, part: Part, logits: Tensor) -> Iterator[tuple[slice, LogitRows]]:
        """Yield the rows of a part in pieces that fit into the caches, with their places in the part."""
        step = block_rows(logits, self._facts.dtype)
        for first, block, _ in logit_blocks(logits, None) if logits.numel() else ():
            for start in range(first, first + len(block), step):
                piece = block[start - first : start - first + step]
                place = slice(start, start + len(piece))
                yield place, LogitRows(self._facts.rows(index_of(part, place.start, place.stop)), Block(piece))

    def result(self) -> Tensor:
        """Return the ranks (N,) over all classes; -1 for rows without a target."""
        if self._setting.call.shards is not None:
            from xent.backends.torch.shards.collectives import add_up

            add_up(self._counts, self._setting.call.shards.group).wait()
        return masked(masked(self._counts, self._facts.ignored, -1), self._facts.invalid, -1)
