"""Validation of `vocab_parallel=` and of split tokens that needs no framework."""

import numbers
from typing import Any

from xent.core.arrays import FLOAT_DTYPES, describe, dtype_name, shown
from xent.core.call import Shards
from xent.core.spec import VocabParallel

__all__ = ["check_tokens", "shards_of"]


def shards_of(framework: str, given: Any) -> Shards | None:
    """Return the validated description of shards, or None if the vocabulary is not in shards."""
    if given is None:
        return None
    if framework != "torch":
        raise TypeError(
            "vocab_parallel needs PyTorch tensors, which torch.distributed moves between processes, and got "
            f"{framework} arrays: pass the whole logits or classifier and no vocab_parallel, or torch tensors"
        )
    if isinstance(given, Shards):
        return given
    shards = given if isinstance(given, VocabParallel) else VocabParallel(given)
    for name, least in (("first", 0), ("size", 1)):
        value: Any = getattr(shards, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"vocab_parallel.{name} must be an int or None, got {describe(value)}")
        if not least <= int(value) < 2**31:
            raise ValueError(f"vocab_parallel.{name} must be in [{least}, 2^31), got {value}")
    sequence_parallel: Any = shards.sequence_parallel
    if not isinstance(sequence_parallel, bool):
        raise TypeError(f"vocab_parallel.sequence_parallel must be a bool, got {shown(sequence_parallel)}")
    first, size = (None if value is None else int(value) for value in (shards.first, shards.size))
    return Shards(shards.group, first, size, -2 if sequence_parallel else None)


def check_tokens(input: Any, target: Any, axis: int, heads: int | None) -> tuple[int, ...]:
    """Return the shape of the rows (..., T), which is the target's, for an `input` (..., T_r, D) split along `axis`.

    With heads, both the input and the result have a first axis of heads.
    """
    rows = tuple(target.shape)
    if dtype_name(target) in FLOAT_DTYPES:
        rows = rows[:-1]
    shape = tuple(input.shape)
    lead = 0 if heads is None else 1
    mine = shape[lead:-1]
    cut = axis % max(len(mine) + 1, 1)
    alike = len(mine) == len(rows) and all(mine[place] == rows[place] for place in range(len(mine)) if place != cut)
    if not mine or not alike or mine[cut] > rows[cut]:
        raise ValueError(
            f"with sequence_parallel, input must have shape (..., T_r, D) and target that of all tokens, (..., T); got "
            f"input {tuple(input.shape)} and target {tuple(target.shape)}"
        )
    return shape[:lead] + rows
