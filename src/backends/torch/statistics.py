"""The statistics that have gradients (lse, nll and entropy, with reduction "none"), and their upstream gradients."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from xent.backends.torch.job import Upstream
from xent.core.spec import DIFFERENTIABLE

__all__ = ["constant", "found_entropy", "upstream_of"]


def _carries(reduction: str, name: str) -> bool:
    return reduction == "none" and name in DIFFERENTIABLE


def constant(reduction: str, names: Sequence[str], stats: Sequence[Tensor]) -> list[Tensor]:
    """Return the statistics that have no gradients."""
    return [value for name, value in zip(names, stats, strict=True) if not _carries(reduction, name)]


def found_entropy(reduction: str, names: Sequence[str], stats: Sequence[Tensor]) -> Tensor | None:
    """Return the entropy (N,) if it may have an upstream gradient, otherwise None."""
    return stats[names.index("entropy")] if "entropy" in names and _carries(reduction, "entropy") else None


def upstream_of(reduction: str, names: Sequence[str], of_loss: Tensor | None, of_stats: Sequence[Any]) -> Upstream:
    """Return the upstream gradients of the loss and of those statistics that have gradients."""
    if not names:
        return Upstream(of_loss)
    given = {name: one for name, one in zip(names, of_stats, strict=True) if _carries(reduction, name)}
    return Upstream(of_loss, **given)
