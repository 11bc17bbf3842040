"""Ranks with other rows, or with classes that do not tile the vocabulary: an error that names both, or NaN; no number.

The error is for CPUs. NaN, where the host may not wait, is tested on CPUs too, by turning the look at values off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import xent
from tests.distributed.pool import GPUS, Pool, device, group
from xent.backends.torch.contract import Schedule
from xent.backends.torch.portable import steps

ROWS, CLASSES, WIDTH, TAUGHT = 6, 10, 8, 5
LAST = 4
"""The row that differs on the last rank."""
BACKENDS = ("auto", "torch") if GPUS else ("torch",)
RANKS = (2,) if GPUS and torch.cuda.device_count() < 3 else (2, 3)


def cut(rank: int, ranks: int) -> slice:
    """Return the classes of a rank; the last one has none if there are three."""
    step = CLASSES if ranks == 1 else CLASSES // 2
    return slice(min(step * rank, CLASSES), min(step * (rank + 1), CLASSES))


def drawn(seed: int = 0) -> dict[str, Tensor]:
    """Return the whole arrays of all calls."""
    generator = torch.Generator().manual_seed(seed)
    found = {
        "logits": torch.randn(ROWS, CLASSES, generator=generator),
        "input": torch.randn(ROWS, WIDTH, generator=generator),
        "linear_weight": torch.randn(CLASSES, WIDTH, generator=generator),
        "target": torch.randint(CLASSES, (ROWS,), generator=generator),
        "probabilities": torch.randn(ROWS, CLASSES, generator=generator).softmax(-1),
        "support": torch.stack([torch.randperm(CLASSES, generator=generator)[:7] for _ in range(ROWS)]),
        "sample_weight": torch.rand(ROWS, generator=generator) + 0.5,
        "temperature": torch.rand(ROWS, generator=generator) + 0.5,
        "teacher.logits": torch.randn(ROWS, CLASSES, generator=generator),
        "teacher.input": torch.randn(ROWS, TAUGHT, generator=generator),
        "teacher.weight": torch.randn(CLASSES, TAUGHT, generator=generator),
        "teacher.ids": torch.stack([torch.randperm(CLASSES, generator=generator)[:3] for _ in range(ROWS)]),
        "teacher.log_probs": torch.rand(ROWS, 3, generator=generator) - 3,
    }
    for row in range(ROWS):  # the first class of a support is the target
        found["support"][row][found["support"][row] == found["target"][row]] = found["support"][row, 0]
        found["support"][row, 0] = found["target"][row]
    return {name: value.to(device()) for name, value in found.items()}


CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "logits": ("cross_entropy", ("target", "sample_weight")),
    "logits, probabilities": ("cross_entropy", ("sample_weight",)),
    "hidden": ("linear_cross_entropy", ("input", "target", "sample_weight")),
    "hidden, probabilities": ("linear_cross_entropy", ("input", "sample_weight")),
    "log probs": ("log_probs", ("target", "temperature")),
    "log probs, support": ("log_probs", ("target", "temperature", "support")),
    "hidden log probs": ("linear_log_probs", ("input", "target", "temperature")),
    "hidden log probs, support": ("linear_log_probs", ("input", "target", "support")),
    "teacher's logits": ("divergence", ("sample_weight",)),
    "linear teacher": ("divergence", ("teacher.input", "sample_weight")),
    "top k": ("divergence", ("teacher.ids", "teacher.log_probs", "sample_weight")),
    "hidden, teacher's logits": ("linear_divergence", ("input", "sample_weight")),
    "hidden, linear teacher": ("linear_divergence", ("input", "teacher.input", "sample_weight")),
    "hidden, top k": ("linear_divergence", ("input", "teacher.ids", "teacher.log_probs")),
}
"""Name -> the function, and the arrays that must be equal on all ranks."""
OF_PROBABILITIES = ("logits, probabilities", "hidden, probabilities")


def arguments_of(name: str, arrays: dict[str, Tensor], classes: slice) -> dict[str, Any]:
    """Return the arguments of a call on some classes. The first ones require a gradient."""
    function, same = CALLS[name]
    linear = function.startswith("linear_")
    leaves = ("input", "linear_weight") if linear else ("logits",)
    found: dict[str, Any] = {one: arrays[one] for one in (*leaves, *same) if "." not in one and one != "support"}
    for one in ("logits", "linear_weight"):
        if one in leaves:
            found[one] = arrays[one][:, classes] if one == "logits" else arrays[one][classes]
    if "target" in same or "support" in same:
        found["target"] = arrays["target"]
    if name in OF_PROBABILITIES:
        found["target"] = arrays["probabilities"][:, classes]
    if "support" in same:
        offsets = torch.arange(ROWS + 1, device=device()) * arrays["support"].shape[1]
        found["support"] = xent.Support(arrays["support"].flatten(), offsets)
    if "teacher's" in name:
        found["teacher"] = arrays["teacher.logits"][:, classes]
    elif "linear teacher" in name:
        found["teacher"] = xent.LinearTeacher(arrays["teacher.input"], arrays["teacher.weight"][classes])
    elif "top k" in name:
        found["teacher"] = xent.TopKTeacher(arrays["teacher.ids"], arrays["teacher.log_probs"])
    if "log_probs" not in function:
        found["reduction"] = "none"
    return found | {one: found[one].detach().clone().requires_grad_() for one in leaves}


def changed(name: str, array: Tensor) -> Tensor:
    """Return an array with another value in one row."""
    array, row = array.clone(), array[LAST]
    if name == "target":
        array[LAST] = (row + 1) % CLASSES
    elif name == "support":
        array[LAST, -1] = next(one for one in range(CLASSES) if one not in row.tolist())
    else:
        array[LAST] = row.roll(1, -1) if array.dim() > 1 else row + 0.125
    return array


@contextmanager
def looking(looks: bool) -> Iterator[None]:
    """Return a context in which the steps may, or may not, read values that ranks compare."""
    with pytest.MonkeyPatch.context() as patch:
        if not looks:
            patch.setattr(steps, "looks_at_targets", lambda device: False)
        yield


def call(
    name: str, differs: str, looks: bool, ranks: int, backend: str, classes: Any = None, ignored: bool = False
) -> Any:
    """Return the losses and gradients of a call in which an array differs on the last rank, or the error's text.

    `classes`: the (first, stop) of each rank, by default its `cut`. `ignored`: whether the row that differs has no
    result.
    """
    rank = dist.get_rank()
    if rank >= ranks:
        return None
    arrays, here = drawn(), cut(rank, ranks) if classes is None else slice(*classes[rank])
    if ignored:
        arrays["target"][LAST], arrays["sample_weight"][LAST] = -100, 0
    if differs == "ignored" and rank == ranks - 1:
        arrays["target"][LAST] = -100
    elif differs and rank == ranks - 1:
        arrays[differs] = changed(differs, arrays[differs])
    arguments = arguments_of(name, arrays, here)
    shards = xent.VocabParallel(group(ranks), first=here.start, size=CLASSES)
    leaves = [one for one in arguments.values() if isinstance(one, Tensor) and one.requires_grad]
    try:
        with looking(looks):
            loss = getattr(xent, CALLS[name][0])(**arguments, vocab_parallel=shards, backend=backend)
            made = torch.autograd.grad(loss.sum(), leaves)
    except ValueError as error:
        return str(error)
    return [one.detach().cpu() for one in (loss, *made)]


CASES = [(name, differs) for name, (_, same) in CALLS.items() for differs in same]


@pytest.mark.skipif(GPUS, reason="accelerators do not wait for values")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "differs"), CASES)
def test_rows_that_differ_are_an_error(pool: Pool, name: str, differs: str, ranks: int) -> None:
    for rank, text in enumerate(pool.run(call, name, differs, True, ranks, "torch")[:ranks]):
        assert isinstance(text, str)
        message = f"rank {rank}: {differs} of rank {ranks - 1} differs from that of rank 0, first in row {LAST}"
        assert text.startswith(message)
        assert "write model.lm_head.unshard() before the loss" in text


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "differs"), CASES)
def test_rows_that_differ_are_nan_where_the_host_may_not_wait(pool: Pool, name: str, differs: str, ranks: int) -> None:
    for backend in BACKENDS:
        check_nan(pool, name, differs, ranks, backend)


def check_nan(pool: Pool, name: str, differs: str, ranks: int, backend: str) -> None:
    """Check that a row that differs is NaN on all ranks, and that the other rows have the bits of an equal call."""
    found, equal = (pool.run(call, name, one, False, ranks, backend)[:ranks] for one in (differs, ""))
    same = torch.arange(ROWS) != LAST
    for mine, expected in zip(found, equal, strict=True):
        for result, good in zip(mine[:2], expected[:2], strict=True):  # losses, and gradients of rows
            assert result[LAST].isnan().all()
            assert not good.isnan().any()
            assert torch.equal(result[same], good[same])


@pytest.mark.parametrize("name", ["logits", "log probs", "log probs, support"])
def test_a_row_that_one_rank_ignores_is_nan(pool: Pool, name: str) -> None:
    for backend in BACKENDS:
        check_nan(pool, name, "ignored", 2, backend)


IGNORED = [("hidden", "input"), ("log probs", "temperature"), ("linear teacher", "teacher.input")]


@pytest.mark.parametrize(("name", "differs"), IGNORED)
def test_rows_without_a_result_may_differ(pool: Pool, name: str, differs: str) -> None:
    for backend in BACKENDS:
        check_ignored(pool, name, differs, backend)


def check_ignored(pool: Pool, name: str, differs: str, backend: str) -> None:
    """Check that a difference in a row without a result changes nothing."""
    found, equal = (pool.run(call, name, one, False, 2, backend, None, True)[:2] for one in (differs, ""))
    for mine, expected in zip(found, equal, strict=True):
        assert all(map(torch.equal, mine, expected))
        assert mine[0][LAST] == 0


CUTS: dict[str, tuple[list[tuple[int, int]], str]] = {
    "overlap, although as many classes as there are": (
        [(0, 6), (4, 8)],
        "the shards overlap: rank 1 has classes [4, 8) and should have [6, 10), after those of rank 0",
    ),
    "gap": ([(0, 4), (6, 10)], "the shards leave a gap: rank 1 has classes [6, 10) and should have [4, 8), after"),
    "gap at the end": ([(0, 5), (5, 9)], "the shards leave a gap: rank 1 has the last classes, up to 9, and should"),
    "all classes": (
        [(0, 10), (0, 10)],
        "all 2 ranks have the same 10 classes: is that the whole vocabulary",
    ),
    "twice": ([(0, 5), (0, 5), (5, 10)], "the shards overlap: rank 1 has classes [0, 5) and should have [5, 10)"),
    "swapped": ([(5, 10), (0, 5)], ""),
    "empty": ([(0, 10), (10, 10)], ""),
    "empty within": ([(3, 3), (0, 10)], ""),
}
"""Name -> the classes of each rank, and the error, if there is one."""
BY_KERNELS = ("logits", "hidden", "hidden, linear teacher")
"""The calls for which Triton has kernels in shards: class indices and dense teachers."""


@pytest.mark.parametrize("name", [*BY_KERNELS, "hidden, probabilities", "hidden log probs, support", "hidden, top k"])
@pytest.mark.parametrize("how", CUTS)
def test_ranges_that_do_not_tile_the_vocabulary(pool: Pool, how: str, name: str) -> None:
    for backend in BACKENDS:
        check_ranges(pool, how, name, backend)


def check_ranges(pool: Pool, how: str, name: str, backend: str) -> None:
    """Check that ranges that overlap or leave gaps are an error, or NaN where the host may not wait."""
    classes, message = CUTS[how]
    ranks = len(classes)
    if ranks > RANKS[-1]:
        pytest.skip("takes more GPUs")
    alone = pool.run(call, name, "", False, 1, backend, [(0, CLASSES)])[0]
    for loss, of_rows, *_ in pool.run(call, name, "", False, ranks, backend, classes)[:ranks]:
        if message:
            assert loss.isnan().all()
            assert of_rows.isnan().all()
        else:
            torch.testing.assert_close(loss, alone[0], rtol=1e-5, atol=1e-6)
    if backend == "torch" and not GPUS:
        for rank, result in enumerate(pool.run(call, name, "", True, ranks, backend, classes)[:ranks]):
            assert not message or result.startswith(f"rank {rank}: {message}")


def equal_bits(name: str, ranks: int, backend: str) -> Any:
    """Return the loss of a call whose rows are the same on all ranks, with NaN in one."""
    rank, arrays = dist.get_rank(), drawn()
    if rank >= ranks:
        return None
    arrays["input"][LAST, 0] = torch.nan
    here = cut(rank, ranks)
    shards = xent.VocabParallel(group(ranks), first=here.start, size=CLASSES)
    arguments = arguments_of(name, arrays, here)
    loss = getattr(xent, CALLS[name][0])(**arguments, vocab_parallel=shards, backend=backend)
    loss.sum().backward()
    grad = next(arguments[one].grad for one in ("input", "logits") if one in arguments)
    return [one.detach().cpu().view(torch.int32).clone() for one in (loss, *([grad] if "input" in arguments else []))]


@pytest.mark.parametrize("ranks", [1, *RANKS])
@pytest.mark.parametrize("name", CALLS)
def test_equal_rows_have_equal_bits_on_all_ranks(pool: Pool, name: str, ranks: int) -> None:
    for backend in BACKENDS:
        first, *others = pool.run(equal_bits, name, ranks, backend)[:ranks]
        for other in others:
            assert all(map(torch.equal, first, other))


def ignoring(looks: bool, ranks: int, reduction: str) -> Any:
    """Return the loss where each rank ignores another number of rows, or the error's text."""
    rank = dist.get_rank()
    if rank >= ranks:
        return None
    arrays, here = drawn(), cut(rank, ranks)
    arguments = arguments_of("hidden", arrays, here) | {"reduction": reduction}
    arguments["target"] = arrays["target"].clone()
    arguments["target"][: 2 * rank + 1] = -100
    shards = xent.VocabParallel(group(ranks), first=here.start, size=CLASSES)
    try:
        with looking(looks):  # parts of two rows
            loss = xent.linear_cross_entropy(**arguments, vocab_parallel=shards, workspace=4 * CLASSES * 2)
            loss.sum().backward()
    except ValueError as error:
        return str(error)
    return loss.detach().cpu()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_ignore_other_numbers_of_rows(pool: Pool, ranks: int, reduction: str) -> None:
    for loss in pool.run(ignoring, False, ranks, reduction)[:ranks]:
        assert loss.isnan().any()
    others = "1, 2" if ranks > 2 else "1"
    for rank, text in enumerate([] if GPUS else pool.run(ignoring, True, ranks, reduction)[:ranks]):
        assert text.startswith(
            f"rank {rank}: target of rank {others} differs from that of rank 0, first in row 1: -100"
        )


class SkippingForward(Schedule):
    """Skips rows in the forward pass alone; on a GPU the first part of a backward pass may have such rows too."""

    def __init__(self, steps: Any, setting: Any, step: int, skips: bool) -> None:
        super().__init__(steps, setting, step, skips and setting.upstream is None)


def bias_gradient(ranks: int) -> list[Tensor]:
    """Return the gradient of the bias with equal schedules of both passes, and with other rows in the backward pass."""
    group_of_ranks = group(ranks)
    rank = dist.get_rank()
    if rank >= ranks:
        return []
    arrays, classes = drawn(), cut(rank, ranks)
    arrays["target"][LAST] = -100
    gradients = []
    for schedule in (Schedule, SkippingForward):
        bias = torch.zeros(CLASSES, device=device())[classes].requires_grad_()
        with looking(False), pytest.MonkeyPatch.context() as patch:
            patch.setattr("xent.backends.torch.loop.Schedule", schedule)
            loss = xent.linear_cross_entropy(
                arrays["input"],
                arrays["linear_weight"][classes],
                arrays["target"],
                linear_bias=bias,
                reduction="none",
                vocab_parallel=xent.VocabParallel(group_of_ranks, first=classes.start, size=CLASSES),
            )
            gradients += torch.autograd.grad(loss.sum(), bias)
    return gradients


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_that_the_backward_pass_alone_computes_are_not_nan(pool: Pool, ranks: int) -> None:
    for gradients in pool.run(bias_gradient, ranks):
        if gradients:
            torch.testing.assert_close(*gradients)
