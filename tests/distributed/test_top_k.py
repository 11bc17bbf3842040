"""The most probable classes, and ranks, of a vocabulary in shards equal those of the whole one, on every rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import xent
from tests.covering import crossed
from tests.distributed.pool import PROCESSES, Pool, device, group
from tests.targets import Target

CLASSES, PADDED, WIDTH = 60, 66, 6
CUTS = {"even": (30, 60), "empty": (0, 60), "of one class": (1, 60), "three": (11, 50, 60), "padded": (33, 66)}
CUTS = {name: stops for name, stops in CUTS.items() if len(stops) <= PROCESSES}


def whole(dtype: torch.dtype) -> tuple[Any, ...]:
    """Return hidden states, a classifier with padding and targets, the same in all processes; many logits are equal."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-2, 3, (3, 5, WIDTH), generator=generator)
    weight = torch.randint(-2, 3, (PADDED, WIDTH), generator=generator)
    target = torch.randint(CLASSES, (3, 5), generator=generator)
    target[0, 0] = -100
    return hidden.to(device(), dtype), weight.to(device(), dtype), target.to(device())


def shards(cut: str, names: bool) -> tuple[Any, slice]:
    """Return the description of this rank's shard, and its classes; None in a process that has none."""
    stops, rank = CUTS[cut], dist.get_rank()
    if rank >= len(stops):
        return None, slice(0)
    first = (0, *stops)[rank]
    described = {"size": CLASSES} | ({"first": first} if names else {})
    return xent.VocabParallel(group(len(stops)), **described), slice(first, stops[rank])


def _backend(target: Target) -> str:
    """Return the target's name; "auto" if its device is a GPU and the processes have none each."""
    return target.name if target.device == device().type else "auto"


def _same(cut: str, k: int, dtype: torch.dtype, options: dict[str, Any], names: bool, backend: str) -> None:
    parallel, own = shards(cut, names)
    if parallel is None:
        return
    hidden, weight, _ = whole(dtype)
    logits = hidden.float() @ weight.float().t()
    logits[1, 1, 7], logits[2] = torch.nan, 2.0
    logits[1, 2, 9:] = -torch.inf
    named = {"backend": backend, **options}
    for expected, found in (
        (
            xent.top_k(logits[..., :CLASSES], k, **named),
            xent.top_k(logits[..., own], k, vocab_parallel=parallel, **named),
        ),
        (
            xent.linear_top_k(hidden, weight[:CLASSES], k, **named),
            xent.linear_top_k(hidden, weight[own], k, workspace=200, vocab_parallel=parallel, **named),
        ),
    ):
        assert found.ids.dtype == torch.int64
        valid = ~expected.log_probs.isnan()
        assert torch.equal(found.log_probs.isnan(), ~valid)
        assert torch.equal(found.ids[valid], expected.ids[valid])
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5, equal_nan=True)
        sent = [torch.empty_like(found.log_probs) for _ in CUTS[cut]]
        dist.all_gather(sent, found.log_probs, group=parallel.group)
        assert all(torch.equal(one.nan_to_num(), sent[0].nan_to_num()) for one in sent)


@pytest.mark.parametrize(
    *crossed(
        cut=[*CUTS],
        k=[1, 4, 25, 60],
        dtype=[torch.float32, torch.bfloat16],
        options=[{}, {"softcap": 2.0, "temperature": 0.7}, {"logit_scale": -0.5}],
        names=[False, True],
    )
)
def test_classes_of_shards(
    pool: Pool, target: Target, cut: str, k: int, dtype: torch.dtype, options: dict[str, Any], names: bool
) -> None:
    """Shards may have fewer classes than k, or none. Log-probabilities have the same bits on every rank."""
    pool.run(_same, cut, k, dtype, options, names, _backend(target))


def _ranks(cut: str, dtype: torch.dtype, options: dict[str, Any], support: bool, backend: str) -> None:
    parallel, own = shards(cut, True)
    if parallel is None:
        return
    hidden, weight, target = whole(dtype)
    logits = hidden.float() @ weight.float().t()
    logits[1, 1, 7] = torch.nan
    named: dict[str, Any] = {"stats": ("rank", "accuracy", "predictions"), "backend": backend, **options}
    if support:
        ids, offsets = torch.arange(0, CLASSES, 4).repeat(15), torch.arange(16) * 15
        named["support"] = xent.Support(ids.to(device()), offsets.to(device()))
    if named.get("temperature") == "rows":
        named["temperature"] = torch.linspace(0.5, 2, 15, device=device()).view(3, 5)
    expected = xent.log_probs(logits[..., :CLASSES], target, **named)[1]
    found = xent.log_probs(logits[..., own], target, vocab_parallel=parallel, **named)[1]
    of_hidden = xent.linear_log_probs(hidden, weight[own], target, workspace=200, vocab_parallel=parallel, **named)[1]
    assert torch.equal(found.rank, expected.rank)
    assert torch.equal(found.accuracy, expected.accuracy)
    assert found.rank[0, 0] == -1
    rest = torch.arange(15, device=device()).view(3, 5) != 6  # the row with NaN among its logits
    assert torch.equal(of_hidden.rank[rest], expected.rank[rest])


@pytest.mark.parametrize(
    *crossed(
        cut=[*CUTS],
        dtype=[torch.float32, torch.bfloat16],
        options=[{}, {"softcap": 2.0, "temperature": "rows"}, {"logit_scale": -0.5}],
        support=[False, True],
    )
)
def test_ranks_of_shards(
    pool: Pool, target: Target, cut: str, dtype: torch.dtype, options: dict[str, Any], support: bool
) -> None:
    pool.run(_ranks, cut, dtype, options, support, _backend(target))


def _refuse(names: bool) -> None:
    parallel, own = shards("even", names)
    if parallel is None:
        return
    hidden, weight, _ = whole(torch.float32)
    logits, rank = (hidden @ weight.t())[..., own], dist.get_rank()
    for words, call in (
        ("all ranks must make the same call", lambda: xent.top_k(logits, 3 + rank, vocab_parallel=parallel)),
        (
            "input of rank 1 differs",
            lambda: xent.linear_top_k(hidden + rank, weight[own], 3, vocab_parallel=parallel),
        ),
        ("the number of tokens differs", lambda: xent.top_k(logits[: 3 - rank], 3, vocab_parallel=parallel)),
        ("number of classes, 60, got 61", lambda: xent.top_k(logits, 61, vocab_parallel=parallel)),
        (
            "gather the hidden states first",
            lambda: xent.linear_top_k(
                hidden, weight[own], 3, vocab_parallel=xent.VocabParallel(parallel.group, sequence_parallel=True)
            ),
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("names", [False, True])
def test_errors(pool: Pool, names: bool) -> None:
    """Also where every rank names its range; the error is the same on every rank."""
    pool.run(_refuse, names)


def _dtensors() -> None:
    if dist.get_rank() > 1:
        return
    mesh = DeviceMesh.from_group(group(2), device().type)
    hidden, weight, _ = whole(torch.float32)
    weight = weight[:CLASSES]
    logits = hidden @ weight.t()
    half = slice(30 * dist.get_rank(), 30 * dist.get_rank() + 30)
    cut = DTensor.from_local(weight[half], mesh, [Shard(0)])
    of_logits = xent.top_k(DTensor.from_local(logits[..., half], mesh, [Shard(2)]), 4)
    for found in (of_logits, xent.linear_top_k(hidden, cut, 4)):
        expected = xent.top_k(logits, 4)
        assert torch.equal(found.ids, expected.ids)
        torch.testing.assert_close(found.log_probs, expected.log_probs)


def test_dtensors(pool: Pool) -> None:
    pool.run(_dtensors)
