"""What all blocks of a call share, and the coefficients that carry the results of `finish` to `gradient`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.contract import Setting, smooths
from xent.backends.torch.exponentials import Exponentials
from xent.backends.torch.memory import Rows
from xent.backends.torch.portable.facts import Facts, Index, at
from xent.core.call import Classes, Probabilities

__all__ = ["Coefficients", "Workspace"]


class Coefficients(NamedTuple):
    """Coefficients of the gradient of R rows, each (R,); None for 0: see `xent.backends.torch.portable.rows`."""

    peak: Tensor
    alpha: Tensor
    beta: Tensor | None = None
    delta: Tensor | None = None
    share: Tensor | None = None
    given: Tensor | None = None
    at_target: Tensor | None = None
    zero: Tensor | None = None
    """(R,) bool: rows whose gradient is exactly 0, whatever their logits are."""
    invalid: Tensor | None = None
    """(R,) bool: rows whose gradient is NaN; only with a support."""

    def of(self, rows: slice) -> "Coefficients":
        """Return the coefficients of some rows."""
        some: list[Any] = [None if one is None else one[rows] for one in self]
        return Coefficients(*some)


class Workspace:
    """The setting of a call, its facts and column names, and buffers that all blocks share."""

    def __init__(self, setting: Setting, facts: Facts, names: tuple[str, ...]) -> None:
        self.setting, self.facts, self.names, self.exponentials = setting, facts, names, Exponentials()
        self._buffers: dict[str, Tensor] = {}
        target, options = setting.call.target, setting.call.options
        self.quick = (
            setting.device.type == "cpu"
            and facts.plain
            and isinstance(target, Classes)
            and not smooths(options.label_smoothing)
        )
        """Whether rows of many classes get a quick reference. Statistics have no influence on it, nor on bits."""
        self._probabilities, self._order = None, None
        if isinstance(target, Probabilities):
            self._probabilities, self._order = Rows(target.values), target.order

    def given(self, index: Index) -> Tensor:
        """Return the target probabilities of some rows, (R, C), in the caller's dtype."""
        assert self._probabilities is not None
        if self._order is not None:
            return self._probabilities.take(at(self._order, index).clamp(min=0))
        if isinstance(index, Tensor):
            return self._probabilities.take(index)
        rows = slice(0, self.setting.count) if index is None else index
        return self._probabilities.block(rows.start, rows.stop)

    def buffer(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return memory with the shape of `like` (R, C)."""
        held = self._buffers.get(name)
        if held is None or held.shape[0] < like.shape[0] or held.shape[1] != like.shape[1]:
            held = self._buffers[name] = torch.empty(like.shape, dtype=dtype, device=like.device)
        return held if held.shape[0] == like.shape[0] else held[: like.shape[0]]
