"""Merge the sums of all ranks for the rows of a part, and record their results, in PyTorch operations."""

import torch
from torch import Tensor

from xent.backends.torch.activation import activate
from xent.backends.torch.schedule import Part
from xent.backends.torch.sharded.finish import Known, coefficients, kept_names, losses
from xent.backends.torch.sharded.steps import Coefficients, Landing, Shard
from xent.backends.torch.sharded.sums import Merged, Slots, logits_of_targets, merge

__all__ = ["again", "land"]


def land(shard: Shard, sums: Slots, landing: Landing) -> Coefficients | None:
    """See `xent.backends.torch.sharded.steps.Steps.land`."""
    facts, part, weights = shard.facts, landing.part, landing.weights
    rows = slice(part.start, part.stop)
    target = None if facts.target is None else facts.target[rows]
    row_weight = None if weights is None else weights.of_rows[part.indices]
    total_weight = None if weights is None else weights.total[part.indices]
    of_ranks = None if weights is None else weights.of_ranks
    z_y = None if target is None else logits_of_targets(sums)
    x_y = None if z_y is None else _activated(shard, rows, z_y)
    merged = merge(sums, shard.layout, target, x_y, row_weight, of_ranks, facts.support is not None)
    known = Known(
        merged.peak,
        merged.log_sum,
        merged.log_p,
        z_y,
        row_weight,
        total_weight,
        merged.entropy,
        merged.mass,
        merged.given,
    )
    _record(shard, merged, known, landing)
    if landing.kept is not None:
        kept = torch.stack([getattr(known, name) for name in _kept_names(shard)])
        part.put(kept.t(), landing.kept.t())
    return coefficients(known, facts, rows) if landing.wanted else None


def again(shard: Shard, kept: Tensor, part: Part) -> Coefficients:
    """See `xent.backends.torch.sharded.steps.Steps.again`."""
    rows = slice(part.start, part.stop)
    saved = zip(_kept_names(shard), kept[:, part.indices], strict=True)
    return coefficients(Known(**dict(saved)), shard.facts, rows)


def _activated(shard: Shard, rows: slice, z_y: Tensor) -> Tensor:
    """Return x_y (R,) of some rows; -inf for a target outside of its row's support."""
    facts = shard.facts
    x_y = activate(z_y.clone(), facts.spec, None if facts.bend is None else facts.bend[rows])
    if facts.support is None:
        return x_y
    assert facts.target is not None
    pairs = facts.support.pairs(rows.start, rows.stop)
    is_target = pairs.classes == pairs.each_row(facts.target[rows])
    return x_y.masked_fill(pairs.sum(is_target.to(x_y.dtype)) == 0, -torch.inf)


def _kept_names(shard: Shard) -> list[str]:
    facts = shard.facts
    return kept_names(list(facts.spec.stats), facts.probabilities is not None, facts.class_weight is not None)


def _record(shard: Shard, merged: Merged, known: Known, landing: Landing) -> None:
    rows = slice(landing.part.start, landing.part.stop)
    loss, z_term, nll = losses(merged, known, shard.facts, rows)
    found = {
        "loss": loss,
        "z_term": z_term,
        "nll": nll,
        "lse": merged.peak + merged.log_sum,
        "entropy": merged.entropy,
        "predictions": merged.predictions,
        "log_sum_sq_probs": merged.log_sum_sq_probs,
        "mean_logit": merged.mean_logit,
    }
    landing.results.record(rows, found)
    if merged.truth is not None and landing.truth is not None:
        landing.truth[rows] = merged.truth
