"""The per-row results of a call, and the loss and statistics that are computed from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from xent.backends.torch.facts import Facts

__all__ = ["Results", "new_results", "scattered"]

_STATISTICS = ("lse", "nll", "entropy", "predictions", "log_sum_sq_probs", "mean_logit", "z_term")


@dataclass(eq=False, slots=True)
class Results:
    """Per-row results (N,), in the accumulation dtype, which a row pass fills. Those that are not needed are None."""

    like: Tensor
    """A tensor with the shape, dtype and device of the losses."""
    found_loss: Tensor | None = None
    """The losses, None until some are computed."""
    norm: Tensor | None = None
    """(3, N): two parts of lse, whose sum would be rounded, and an unused row. To be subtracted from x in turn."""
    lse: Tensor | None = None
    nll: Tensor | None = None
    entropy: Tensor | None = None
    predictions: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None
    z_term: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """The losses, or memory for them."""
        if self.found_loss is None:
            self.found_loss = torch.empty_like(self.like)
        return self.found_loss

    def record(self, rows: slice, found: Mapping[str, Tensor | None]) -> None:
        """Write values (R,) by name to these rows of the results that are needed."""
        for name, values in found.items():
            place = getattr(self, name)
            if place is not None and values is not None:
                place[rows] = values.to(place)

    def stats(self, facts: Facts, reduced: Callable[[Tensor, Facts], Tensor]) -> list[Tensor]:
        """Return the statistics in the order of the spec, those per row as (N,); `reduced` reduces losses (N,)."""
        special = {
            "nll": self._nll,
            "predictions": self._predictions,
            "z_loss": lambda facts: reduced(self._z_loss(), facts),
            "accuracy": self._accuracy,
            "count": self._count,
        }
        return [
            special[name](facts) if name in special else _counted(getattr(self, name), facts)
            for name in facts.spec.stats
        ]

    def _nll(self, facts: Facts) -> Tensor:
        values = _counted(self.nll, facts)
        return values if facts.invalid is None else values.masked_fill(facts.invalid, torch.nan)

    def _predictions(self, facts: Facts) -> Tensor:
        assert self.predictions is not None
        return self.predictions if facts.ignored is None else self.predictions.masked_fill(facts.ignored, -1)

    def _z_loss(self) -> Tensor:
        assert self.z_term is not None
        return self.z_term

    def _accuracy(self, facts: Facts) -> Tensor:
        correct = self._predictions(facts) == _truth(facts)
        if facts.invalid is not None:
            correct = correct & ~facts.invalid
        if facts.spec.accuracy_of_rows:
            return correct.to(self.loss.dtype)
        return correct.sum().to(self.loss.dtype) / self._count(facts).clamp(min=1)

    def _count(self, facts: Facts) -> Tensor:
        if facts.ignored is None:
            return torch.full((), facts.scale.shape[0], dtype=torch.int64, device=facts.scale.device)
        return (~facts.ignored).sum()


def new_results(facts: Facts, norm: Tensor | None = None) -> Results:
    """Return unfilled results for the rows of `facts`."""
    names, like = facts.spec.stats, facts.scale
    if not names:
        return Results(like, norm=norm)
    wants_prediction = "predictions" in names or "accuracy" in names
    return Results(
        like,
        norm=norm,
        lse=torch.empty_like(like) if "lse" in names else None,
        nll=torch.empty_like(like) if "nll" in names else None,
        entropy=torch.empty_like(like) if "entropy" in names else None,
        predictions=torch.empty_like(like, dtype=torch.int64) if wants_prediction else None,
        log_sum_sq_probs=torch.empty_like(like) if "log_sum_sq_probs" in names else None,
        mean_logit=torch.empty_like(like) if "mean_logit" in names else None,
        z_term=torch.empty_like(like) if "z_loss" in names else None,
    )


def scattered(results: Results, rows: Tensor, count: int) -> Results:
    """Return results of `count` rows: the first of `results` are scattered to `rows`, the others are 0."""

    def spread(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        spacious = values.new_zeros((*values.shape[:-1], count))
        return spacious.index_copy_(-1, rows, values[..., : len(rows)])

    loss = spread(results.loss)
    assert loss is not None
    return Results(loss, loss, **{name: spread(getattr(results, name)) for name in _STATISTICS})


def _counted(values: Tensor | None, facts: Facts) -> Tensor:
    assert values is not None
    return values if facts.ignored is None else values.masked_fill(facts.ignored, 0)


def _truth(facts: Facts) -> Tensor:
    """Return the target class of each row, (N,); for class probabilities the most probable class."""
    if facts.target is not None:
        return facts.target
    count, step = facts.scale.shape[0], 256
    blocks = [facts.probability_block(i, min(i + step, count)).argmax(-1) for i in range(0, count, step)]
    return torch.cat(blocks) if blocks else facts.scale.new_empty(0, dtype=torch.int64)
