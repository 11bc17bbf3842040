"""The per-row results of a call, and the loss and statistics that are computed from them."""

import torch
from torch import Tensor

from xent.backends.torch.contract import Part, Setting, wide
from xent.backends.torch.portable.facts import Facts, index_of
from xent.core.call import Probabilities

__all__ = ["Results"]


class Results:
    """Results (N,) by name; those of rows that are never recorded are 0."""

    def __init__(self, setting: Setting, facts: Facts) -> None:
        self._setting, self._facts = setting, facts
        self._found: dict[str, Tensor] = {}

    def record(self, found: dict[str, Tensor], part: Part, rows: slice) -> None:
        """Record values (R,) of some rows of a part."""
        count = self._setting.count
        index = index_of(part, rows.start, rows.stop, count)
        for name, values in found.items():
            if index is None:
                self._found[name] = values
                continue
            if name not in self._found:
                self._found[name] = values.new_zeros(count)
            self._found[name][index] = values

    def values(self) -> list[Tensor]:
        """Return the loss, then the statistics in the order of the options; those per row as (N,)."""
        return [
            self._reduced(self._alive("loss")),
            *(self._statistic(name) for name in self._setting.call.options.stats),
        ]

    def _of(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        found = self._found.get(name)
        if found is None:
            setting = self._setting
            return torch.zeros(setting.count, dtype=dtype or wide(setting.compute), device=setting.device)
        return found

    def _alive(self, name: str) -> Tensor:
        """Return values that are 0 in rows whose loss is 0."""
        dead, values = self._facts.dead, self._of(name)
        return values if dead is None else values.masked_fill(dead, 0)

    def _reduced(self, values: Tensor) -> Tensor:
        """Reduce losses (N,)."""
        reduction, divisor = self._setting.call.options.reduction, self._facts.divisor
        if reduction == "none":
            return values
        if not isinstance(divisor, Tensor) and divisor == len(values) != 0:
            return values.mean()
        total = values.sum()
        if divisor is None:
            return total
        if isinstance(divisor, Tensor):
            return torch.where(divisor == 0, 0, total / divisor)
        return total / divisor if divisor else torch.zeros_like(total)

    def _statistic(self, name: str) -> Tensor:
        ignored, invalid = self._facts.ignored, self._facts.invalid
        if name == "z_loss":
            return self._reduced(self._alive("z_loss"))
        if name == "count":
            return self._count()
        if name == "predictions":
            return self._predictions()
        if name == "accuracy":
            return self._accuracy()
        values = self._of(name)
        if name == "nll" and invalid is not None:
            values = values.masked_fill(invalid, torch.nan)
        return values if ignored is None else values.masked_fill(ignored, 0)

    def _count(self) -> Tensor:
        ignored, setting = self._facts.ignored, self._setting
        if ignored is None:
            return torch.full((), setting.count, dtype=torch.int64, device=setting.device)
        return (~ignored).sum()

    def _predictions(self) -> Tensor:
        found, ignored = self._of("predictions", torch.int64), self._facts.ignored
        return found if ignored is None else found.masked_fill(ignored, -1)

    def _accuracy(self) -> Tensor:
        facts, options, dtype = self._facts, self._setting.call.options, wide(self._setting.compute)
        given = isinstance(self._setting.call.target, Probabilities)
        truth = self._of("truth", torch.int64) if given else facts.target
        assert truth is not None
        correct = self._predictions() == truth
        if facts.invalid is not None:
            correct = correct & ~facts.invalid
        if options.accuracy_of_rows:
            return correct.to(dtype)
        share: Tensor = correct.sum().to(dtype) / self._count().clamp(min=1)
        return share
