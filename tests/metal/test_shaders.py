"""Kernels on PyTorch tensors in the emulator: limits, refusals, faults, and the number of built kernels."""

import pytest
import torch

from tests.metal.emulator.frontend import FrontendError
from tests.metal.emulator.kernels import Emulator
from tests.metal.emulator.launch import EmulatorError
from tests.metal.test_tensors import DEVICE, METAL, draw, outcome
from xent.backends import ALSO
from xent.backends.metal import sources, tensors
from xent.backends.metal.tensors import RowResults, RowTensors
from xent.command.check.case import Case
from xent.command.check.judge import judge_case


def several_launches() -> None:
    """Run a kernel often enough that some buffer of each name ends where its pages end."""
    for _ in range(4):
        outcome(*draw(vocabulary=5001), **METAL)


pytestmark = pytest.mark.usefixtures("emulator")


@pytest.mark.parametrize("limit", [500, 40])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fewer_threads_if_the_pipeline_has_a_limit(emulator: Emulator, limit: int, reduction: str) -> None:
    emulator.limit = lambda source: limit
    case = Case("cross_entropy", (3,), 20_000, "float32", "plain", reduction=reduction, ignored=0.0)
    for comparison in judge_case(ALSO["metal"](), ALSO["metal"]().harness(DEVICE), case):
        assert comparison.passed, comparison


@pytest.mark.parametrize("limit", [0, 16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_failing_kernel_is_replaced_with_a_warning(emulator: Emulator, limit: int, reduction: str) -> None:
    emulator.limit = lambda source: limit
    logits, target = draw()
    upstream = torch.ones(6) if reduction == "none" else None
    with pytest.warns(RuntimeWarning, match="does not run on this GPU, and PyTorch's operations take its place: "):
        found = outcome(logits, target, upstream, reduction=reduction, **METAL)
    expected = outcome(logits, target, upstream, reduction=reduction, backend="torch")
    assert all(map(torch.equal, found, expected))


def test_a_kernel_is_compiled_once(emulator: Emulator) -> None:
    for vocabulary, rows in ((2100, 8), (4000, 30)):
        outcome(*draw(rows, vocabulary), z_loss=rows / 100, **METAL)
    assert len(emulator.sources) == 1


@pytest.mark.parametrize(
    ("file", "right", "wrong", "message"),
    [
        ("sums", "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);", "", r"missing|uninitialised"),
        (
            "maths",
            "columns.packs = count / width<T>",
            "columns.packs = count / width<T> + 1",
            "out of bounds|no out",
        ),
        (
            "signature",
            "size_t start = static_cast<size_t>(row)",
            "size_t start = (row + 9ul)",
            "out of bounds",
        ),
        ("forward", "loss[row] = dead", "loss[row + 1] = dead", "out of bounds|no output"),
    ],
)
def test_planted_faults_are_detected(
    monkeypatch: pytest.MonkeyPatch, file: str, right: str, wrong: str, message: str
) -> None:
    read = sources._read
    assert right in read(file)
    monkeypatch.setattr(sources, "_read", lambda name: read(name).replace(right, wrong if name == file else right))
    with pytest.raises(EmulatorError, match=message):
        several_launches()


def test_wrong_types_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    read = sources._read
    right, wrong = "const device T* logits,\n    const device long", "const constant T* logits,\n    const device long"
    monkeypatch.setattr(sources, "_read", lambda name: read(name).replace(right, wrong))
    logits, target = draw()
    with pytest.raises(FrontendError):
        outcome(logits, target, **METAL)


def test_memory_outside_the_results_is_unchanged() -> None:
    memory = torch.full((12,), 7.0)
    logits, target = draw()
    ones = torch.ones(6)
    rows = RowTensors(target.clamp(min=0), *(None,) * 5, ones, ones, ones < 0)
    tensors.launch("forward", logits, rows, RowResults(memory[3:9]))
    assert (memory != 7).nonzero().flatten().tolist() == list(range(3, 9))
