"""Divergences of a vocabulary in shards, against the same call in one process in float64: every teacher and option."""

from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import xent
from tests.cases import DTYPES
from tests.distributed.cuts import CUTS, Cut, cut
from tests.distributed.matrix import RANKS
from tests.distributed.planted import replace_collective
from tests.distributed.pool import INTERPRETED, Pool, device, group
from tests.divergence.cases import covering_divergences, divergence_cases
from xent.backends import TABLE
from xent.command.check.case import Case, make_inputs

AXES = {"logits": -1, "linear_weight": 0, "linear_bias": 0}
CLOSE = {"float64": 1e-9, "float32": 4e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""Error of the largest element, relative to it."""


@dataclass(frozen=True)
class Shards:
    ranks: int
    cut: Cut


def cases() -> list[Any]:
    """Return covering sets in two dtypes, some cases in the other dtypes, and all shapes."""
    ways = cycle([(ranks, how) for how in CUTS for ranks in RANKS])
    found = []
    for function in ("divergence", "linear_divergence"):
        for dtype in DTYPES:
            chosen = covering_divergences(function, dtype)[:: 1 if dtype in ("float32", "bfloat16") else 4]
            for case in (*chosen, *(divergence_cases(function, dtype)[::2] if dtype == "float32" else ())):
                ranks, how = next(ways)
                how = "even" if how == "padded" and case.vocabulary < 3 else how  # that would be all classes on a rank
                way = Shards(ranks, cut(how, case.vocabulary, ranks))
                found.append(pytest.param(case, way, id=f"{case}, {ranks} ranks, {how}"))
    return found


def dense_cases() -> list[Any]:
    """Return the cases with a dense teacher that a GPU serves."""
    return [
        one for one in cases() if one.values[0].dtype != "float64" and one.values[0].teacher in ("logits", "linear")
    ]


def results(case: Case, way: Shards, rank: int | None) -> dict[str, Any]:
    """Return loss, entropy and gradients of a rank's shard; of the whole vocabulary in float64 without a rank."""
    harness = TABLE["torch"]().harness(str(device()) if rank is not None else "cpu")
    inputs = make_inputs(case)

    def put(values: Any, axis: int | None, dtype: str | None) -> Any:
        values = harness.array(values, dtype)
        if rank is None:
            return values.double() if values.is_floating_point() else values
        return values if axis is None else harness.array(way.cut.take(harness.numpy(values), rank, axis), dtype)

    wide = "float64" if case.dtype == "float64" else "float32"
    leaves = {name: put(value, AXES.get(name), case.dtype) for name, value in inputs.differentiable.items()}
    leaves = {name: value.detach().requires_grad_() for name, value in leaves.items()}
    known: Any = inputs.target
    if isinstance(known, np.ndarray):
        known = put(known, -1, case.dtype)
    elif isinstance(known, xent.TopKTeacher):
        known = xent.TopKTeacher(put(known.ids, None, None), put(known.log_probs, None, wide), known.tail)
    else:
        parts = {"input": put(known.input, None, case.dtype), "weight": put(known.weight, 0, case.dtype)}
        parts["bias"] = None if known.bias is None else put(known.bias, 0, case.dtype)
        known = replace(known, **parts)
    options = {
        name: put(value, None, wide) if isinstance(value, np.ndarray) else value
        for name, value in inputs.options.items()
    }
    if case.function == "linear_divergence":
        options["workspace"] = case.workspace
    if rank is not None:
        said = {"first": way.cut.firsts[rank]} if way.cut.says_first else {}
        sized = {"size": way.cut.vocabulary} if way.cut.says_first or way.cut.says_size else {}
        one = group(way.ranks)
        options["vocab_parallel"] = xent.VocabParallel(one, **said, **sized) if said or sized else one
        options["backend"] = "triton" if INTERPRETED else "auto"
    call = getattr(xent, case.function)
    loss, stats = call(**leaves, teacher=known, reduction=case.reduction, stats=("entropy",), **options)
    upstream = harness.array(np.asarray(inputs.upstream), None).to(loss)
    grads = torch.autograd.grad(loss, list(leaves.values()), upstream, retain_graph=True)
    again = torch.autograd.grad(loss, list(leaves.values()), upstream)
    assert all(torch.equal(first, second) for first, second in zip(grads, again, strict=True))
    named = {"loss": loss.detach(), "entropy": stats.entropy} | dict(zip(leaves, grads, strict=True))
    return {name: value.cpu().double().numpy() for name, value in named.items()}


def in_shards(case: Case, way: Shards) -> dict[str, Any] | None:
    rank = dist.get_rank()
    return results(case, way, rank) if rank < way.ranks else None


@pytest.mark.parametrize(("case", "way"), cases())
def test_shards_equal_the_whole_vocabulary(pool: Pool, case: Case, way: Shards) -> None:
    judge(pool, case, way)


def judge(pool: Pool, case: Case, way: Shards) -> None:
    """Compare the results of all ranks with those of the whole vocabulary."""
    parts = pool.run(in_shards, case, way)[: way.ranks]
    for name, expected in results(case, way, None).items():
        values = [part[name] for part in parts]
        if name in AXES:
            found = way.cut.join(values, AXES[name])
        else:
            found = values[0]
            for value in values[1:]:
                np.testing.assert_array_equal(value, found, err_msg=f"{name} differs between ranks")
        size = np.abs(expected).max() if expected.size else 0
        close = CLOSE["float32" if name in ("loss", "entropy") and case.dtype != "float64" else case.dtype]
        # A loss of close distributions is a small difference of float32 logits.
        slack = 1e-6 if case.dtype != "float64" else 1e-12
        np.testing.assert_allclose(found, expected, rtol=close, atol=close * size + slack, err_msg=name)


def _tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"student": (4, 10), "teacher": (4, 10), "hidden": (4, 6), "head": (10, 6), "input": (4, 5)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["weight"] = torch.randn(10, 5, generator=generator)
    return {name: array.to(device()) for name, array in made.items()}


def _top_k(ids: list[int]) -> xent.TopKTeacher:
    return xent.TopKTeacher(torch.tensor([ids] * 4, device=device()), torch.full((4, 2), -2.0, device=device()))


def _gathers(kind: str) -> int:
    """Return the number of gathers of a call in one part."""
    if dist.get_rank() > 1:
        return -1
    count = [0]

    def counting(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            count[0] += 1
            return function(*args, **options)

        return call

    given, half = _tensors(), slice(5 * dist.get_rank(), 5 * (dist.get_rank() + 1))
    vocab_parallel = xent.VocabParallel(group(2), first=half.start, size=10)
    teacher: Any = given["teacher"][:, half]
    if kind == "bucket":
        teacher = _top_k([0, 7])
    with pytest.MonkeyPatch.context() as patch:
        replace_collective(patch, "gather", counting)
        student = given["student"][:, half].clone().requires_grad_()
        xent.divergence(student, teacher, vocab_parallel=vocab_parallel, stats=("entropy",))[0].backward()
    return count[0]


@pytest.mark.parametrize(("kind", "gathers"), [("dense", 2), ("bucket", 1)])
def test_gathers_of_a_part(pool: Pool, kind: str, gathers: int) -> None:
    assert pool.run(_gathers, kind)[:2] == [gathers, gathers]


def _refusals() -> None:
    if dist.get_rank() > 1:
        return
    given, half, one = _tensors(), slice(5 * dist.get_rank(), 5 * (dist.get_rank() + 1)), group(2)
    student, head = given["student"][:, half], given["head"][half]
    with pytest.raises(ValueError, match=r"rank \d: teacher must have shape .* student and teacher must be cut alike"):
        xent.divergence(student, given["teacher"], vocab_parallel=one)
    with pytest.raises(ValueError, match=r"teacher.weight must have 5 rows, .* student and teacher must be cut alike"):
        xent.linear_divergence(
            given["hidden"], head, xent.LinearTeacher(given["input"], given["weight"]), vocab_parallel=one
        )
    with pytest.raises(ValueError, match=r"a xent.Subset does not go with vocab_parallel"):
        xent.divergence(student, xent.Subset(given["teacher"], torch.arange(5, device=device())), vocab_parallel=one)
    with pytest.raises(ValueError, match=r"sequence_parallel=True is for xent.linear_cross_entropy"):
        xent.linear_divergence(
            given["hidden"],
            head,
            xent.LinearTeacher(given["input"], given["weight"][half]),
            vocab_parallel=xent.VocabParallel(one, sequence_parallel=True),
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XENT_CHECK_TARGETS", "1")
        with pytest.raises(IndexError, match=r"teacher.ids of row \[0\] holds 10; classes are 0 to 9"):
            xent.divergence(student, _top_k([0, 10]), vocab_parallel=one)
    with pytest.raises(ValueError, match=r"all ranks must make the same call: rank 1 differs from rank 0"):
        xent.divergence(student, given["teacher"][:, half], beta=0.5 * dist.get_rank(), vocab_parallel=one)


def test_refusals(pool: Pool) -> None:
    pool.run(_refusals)


def _compiled(reduction: str) -> None:
    if dist.get_rank() > 1:
        return
    given, half = _tensors(), slice(5 * dist.get_rank(), 5 * (dist.get_rank() + 1))
    head, teacher = given["head"][half], xent.LinearTeacher(given["input"], given["weight"][half])

    def call(hidden: torch.Tensor) -> Any:
        return xent.linear_divergence(hidden, head, teacher, kind="tv", reduction=reduction, vocab_parallel=group(2))

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        hidden = given["hidden"].clone().requires_grad_()
        loss = function(hidden)
        found.append([loss.detach(), *torch.autograd.grad(loss.sum(), hidden)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_graphs(pool: Pool, reduction: str) -> None:
    pool.run(_compiled, reduction)
