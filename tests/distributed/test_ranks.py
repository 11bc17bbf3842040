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
from tests.distributed.pool import GPUS, INTERPRETED, Pool, device, group
from xent.backends.torch.portable import steps

ROWS, CLASSES, WIDTH, TAUGHT = 6, 10, 8, 5
LAST = 4
"""The row that differs on the last rank."""
BACKENDS = ("triton",) if INTERPRETED else ("auto", "torch") if GPUS else ("torch",)
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


def call(name: str, differs: str, looks: bool, ranks: int, backend: str) -> Any:
    """Return the losses and gradients of a call in which an array differs on the last rank, or the error's text."""
    rank = dist.get_rank()
    if rank >= ranks:
        return None
    arrays, here = drawn(), cut(rank, ranks)
    if differs and rank == ranks - 1:
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


@pytest.mark.skipif(GPUS or INTERPRETED, reason="accelerators and their kernels do not wait for values")
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
        found, equal = (pool.run(call, name, one, False, ranks, backend)[:ranks] for one in (differs, ""))
        same = torch.arange(ROWS) != LAST
        for mine, expected in zip(found, equal, strict=True):
            for result, good in zip(mine[:2], expected[:2], strict=True):  # losses, and gradients of rows
                assert result[LAST].isnan().all()
                assert not good.isnan().any()
                assert torch.equal(result[same], good[same])
