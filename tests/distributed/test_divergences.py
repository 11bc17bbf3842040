"""Divergences of a vocabulary in shards, against the same call in one process in float64: every teacher and option."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import xent
from tests.cases import DTYPES
from tests.distributed.calls import Way
from tests.distributed.cuts import CUTS, cut
from tests.distributed.judge import joined
from tests.distributed.matrix import RANKS
from tests.distributed.planted import replace_collective
from tests.distributed.pool import INTERPRETED, Pool, device, group
from tests.divergence.cases import covering_divergences, divergence_cases
from tests.targets import backend_of
from xent.command.check.case import Case
from xent.command.check.harnesses import harness_of
from xent.command.check.judge import results_of_case

BACKEND = "triton" if INTERPRETED else "auto"
CLOSE = {"float64": 1e-9, "float32": 4e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""Error of the largest element, relative to it."""


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
                way = Way(ranks, cut(how, case.vocabulary, ranks), BACKEND)
                found.append(pytest.param(case, way, id=f"{case}, {ranks} ranks, {how}"))
    return found


def dense_cases() -> list[Any]:
    """Return the cases with a dense teacher that a GPU serves."""
    return [
        one for one in cases() if one.values[0].dtype != "float64" and one.values[0].teacher in ("logits", "linear")
    ]


@pytest.mark.parametrize(("case", "way"), cases())
def test_shards_equal_the_whole_vocabulary(pool: Pool, case: Case, way: Way) -> None:
    judge(pool, case, way)


def judge(pool: Pool, case: Case, way: Way) -> None:
    """Compare the results of all ranks with those of the whole vocabulary."""
    case, backend = replace(case, stats=("entropy",), missing=("entropy",)), backend_of("torch")
    found, (truth, *_) = joined(pool, case, way), results_of_case(backend, harness_of(backend), case)
    for name, expected in truth.items():
        size = np.abs(expected).max() if expected.size else 0
        close = CLOSE["float32" if name in case.results and case.dtype != "float64" else case.dtype]
        # A loss of close distributions is a small difference of float32 logits.
        slack = 1e-6 if case.dtype != "float64" else 1e-12
        np.testing.assert_allclose(found[name], expected, rtol=close, atol=close * size + slack, err_msg=name)


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
