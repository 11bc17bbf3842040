"""Several heads with one classifier in shards give the same results as in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

import xent
from tests.distributed.pool import PROCESSES, Pool, device, group
from tests.distributed.test_dtensors import close, flat, put, square

pytestmark = pytest.mark.skipif(PROCESSES < 4, reason="the mesh has two dimensions")

CLASSES, WIDTH, HEADS = 11, 6, (1, 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {"head_weight": (1.0, 0.3)},
    "sum": {"reduction": "sum", "z_loss": 0.1, "label_smoothing": 0.1},
    "none": {"reduction": "none", "stats": ("lse", "entropy")},
    "normalizer": {"normalizer": 7.0, "stats": ("accuracy", "count", "z_loss")},
    "probabilities": {"head_weight": (0.5, 2.0), "stats": ("nll",)},
}
CUTS = (slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 11))
WAYS = ("shards", "tokens in shards", "DTensor", "DTensor, tokens in shards")


def tensors() -> dict[str, Tensor]:
    """Return the whole arrays of a call, the same in all processes."""
    generator = torch.Generator().manual_seed(0)
    drawn = {
        "input": torch.randn(len(HEADS), 2, 8, WIDTH, generator=generator),
        "linear_weight": torch.randn(CLASSES, WIDTH, generator=generator),
        "target": torch.randint(CLASSES, (2, 8), generator=generator),
        "probabilities": torch.rand(2, 8, CLASSES, generator=generator).softmax(-1),
        "weight": torch.rand(CLASSES, generator=generator),
        "sample_weight": torch.rand(2, 8, generator=generator),
    }
    drawn["target"][0, :2] = -100
    return {name: value.to(device()) for name, value in drawn.items()}


def of_rank(input: Tensor, weight: Tensor, way: str) -> tuple[Tensor, Tensor]:
    """Return this rank's part of hidden states and classifier, or of their gradients."""
    rank = dist.get_rank()
    return input.chunk(PROCESSES, 2)[rank] if "tokens" in way else input, weight[CUTS[rank]]


def split(made: Any) -> tuple[Any, Any]:
    """Return loss and statistics, which are None if not requested."""
    return made if isinstance(made, tuple) else (made, xent.Stats())


def compare(way: str, options: str) -> None:
    """Compare a call in four processes with one on the whole vocabulary."""
    mesh, rank = flat(), dist.get_rank()
    sources: tuple[Tensor, ...]
    given, more = tensors(), {**OPTIONS[options], "shift": HEADS}
    target = given["probabilities" if options == "probabilities" else "target"]
    leaves = [given[name].clone().requires_grad_() for name in ("input", "linear_weight")]
    arrays = {name: given[name] for name in ("weight", "sample_weight")}
    expected, stats = split(xent.linear_cross_entropy(*leaves, target, **more, **arrays))
    upstream = torch.rand(expected.shape, generator=torch.Generator().manual_seed(1)).to(device())
    wanted = torch.autograd.grad(expected, leaves, upstream)
    if "DTensor" in way:
        cut = Shard(2) if "tokens" in way else Replicate()
        sources = put(given["input"], mesh, cut), put(given["linear_weight"], mesh, Shard(0))
    else:
        sources = tuple(part.clone().requires_grad_() for part in of_rank(given["input"], given["linear_weight"], way))
        wanted = of_rank(*wanted, way)
        target = target[..., CUTS[rank]] if options == "probabilities" else target
        arrays["weight"] = arrays["weight"][CUTS[rank]]
        more["vocab_parallel"] = xent.VocabParallel(group(PROCESSES), sequence_parallel="tokens" in way)
    found, seen = split(xent.linear_cross_entropy(*sources, target, **more, **arrays))
    reported, known = ([getattr(some, name) for name in more.get("stats", ())] for some in (seen, stats))
    made = torch.autograd.grad(found, sources, upstream)
    close([found, *reported, *made], [expected, *known, *wanted])


def compare_rows() -> None:
    """Compare a call with rows sharded over one dimension of a mesh, and classes over the other."""
    mesh, given = square(), tensors()
    leaves = [given[name].clone().requires_grad_() for name in ("input", "linear_weight")]
    for reduction, axis in (("sum", 1), ("none", 2)):
        more: dict[str, Any] = {"reduction": reduction, "shift": (0, 0)}
        expected = xent.linear_cross_entropy(*leaves, given["target"], **more)
        wanted = torch.autograd.grad(expected, leaves, torch.ones_like(expected))
        sources = (
            put(given["input"], mesh, Shard(axis), Replicate()),
            put(given["linear_weight"], mesh, Replicate(), Shard(0)),
        )
        target = put(given["target"], mesh, Shard(axis - 1), Replicate())
        found = xent.linear_cross_entropy(*sources, target, **more)
        assert found.placements == (Shard(axis) if reduction == "none" else Partial(), Replicate())
        upstream = put(torch.ones_like(expected), mesh, *(found.placements if found.dim() else (Replicate(),) * 2))
        made = torch.autograd.grad(found, sources, upstream.detach())
        close([found, *made], [expected, *wanted])


def refuse() -> None:
    """Make invalid calls."""
    given, mesh = tensors(), flat()
    weight = put(given["linear_weight"], mesh, Shard(0))
    with pytest.raises(ValueError, match="input must have its axis of heads whole"):
        xent.linear_cross_entropy(put(given["input"], mesh, Shard(0)), weight, given["target"], shift=HEADS)
    with pytest.raises(ValueError, match=r"needs input of shape \(3, ..., T, D\), with the hidden states of each head"):
        xent.linear_cross_entropy(given["input"], weight, given["target"], shift=(*HEADS, 2))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_heads(pool: Pool, way: str, options: str) -> None:
    pool.run(compare, way, options)


def test_heads_with_rows_in_shards(pool: Pool) -> None:
    pool.run(compare_rows)


def test_refusals(pool: Pool) -> None:
    pool.run(refuse)
