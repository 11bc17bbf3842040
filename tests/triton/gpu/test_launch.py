"""Repeated launches of kernels without Triton's binder."""

import pytest
import torch
import triton
import triton.language as tl

from xent.backends.triton import launch as launching
from xent.backends.triton.launch import kernel, launch

COUNT = 4096


@kernel
def _combine_kernel(
    source,
    offset,
    found,
    count: "i64",
    pitch: "i64",
    factor: "fp32",
    NEGATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Alignment and values of the arguments are not specialised."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(source + at * pitch, mask=inside, other=0.0) * factor
    if offset is not None:
        x += tl.load(offset + at, mask=inside, other=0.0)
    if NEGATED:
        x = -x
    tl.store(found + at, x, mask=inside)


def calls() -> list[tuple[int, bool, int, int, float, bool]]:
    """Return arguments: offsets of source and found, whether there is an offset, count, pitch, factor, NEGATED.

    Each differs from its neighbours.
    """
    return [
        (start, with_offset, count, pitch, factor, negated)
        for factor, negated in ((2.0, False), (4.0, True))
        for count in (COUNT, 1, COUNT - 5)
        for pitch in (1, 2, 16)
        for with_offset in (True, False)
        for start in (0, 1, 4, 3)
    ]


def test_each_kind_runs_its_own_program() -> None:
    memory, offset = torch.randn(17 * COUNT, device="cuda"), torch.randn(COUNT, device="cuda")
    for _ in range(2):
        for start, with_offset, count, pitch, factor, negated in calls():
            place = torch.zeros(COUNT + 8, device="cuda")
            source, found = memory[start:], place[start:]
            added = offset if with_offset else None
            arguments = (source, added, found, count, pitch, factor)
            constants = {"NEGATED": negated, "BLOCK": 512}
            launch(_combine_kernel, triton.cdiv(count, 512), arguments, constants, num_warps=2)
            expected = source[: count * pitch : pitch] * factor + (offset[:count] if with_offset else 0)
            assert torch.equal(found[:count], -expected if negated else expected)
            assert not found[count:].any()
            assert not place[:start].any()


def test_options_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch with other options runs another program. Repeating either does not call Triton again."""
    x, found = torch.ones(512, device="cuda"), torch.empty(512, device="cuda")
    looks, look = [], _combine_kernel.run
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(_combine_kernel, "run", lambda *given, **named: looks.append(named) or look(*given, **named))
    for warps in (1, 2, 1, 2):
        arguments = (x, None, found, 512, 1, 2.0)
        launch(_combine_kernel, 1, arguments, {"NEGATED": False, "BLOCK": 512}, num_warps=warps)
    if launching._IS_TRIED:
        programs = [compiled.kernel for compiled in launching._compiled.values()]
        assert sorted(program.metadata.num_warps for program in programs) == [1, 2]
        assert len(looks) == 2
    assert bool((found == 2).all())


def test_order_of_constants_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_compiled", {})
    x, found = torch.ones(512, device="cuda"), torch.empty(512, device="cuda")
    for _ in range(3):
        launch(_combine_kernel, 1, (x, None, found.zero_(), 512, 1, 2.0), {"BLOCK": 512, "NEGATED": True})
        assert bool((found == -2).all())


def test_stream_is_the_callers() -> None:
    x, found = torch.ones(512, device="cuda"), torch.empty(512, device="cuda")
    arguments, constants = (x, None, found, 512, 1, 2.0), {"NEGATED": False, "BLOCK": 512}
    for _ in range(2):
        launch(_combine_kernel, 1, arguments, constants)
    graph, before = torch.cuda.CUDAGraph(), found.clone()
    with torch.cuda.graph(graph):
        launch(_combine_kernel, 1, arguments, constants)
    x.fill_(5)
    graph.replay()
    assert bool((before == 2).all())
    assert bool((found == 10).all())
