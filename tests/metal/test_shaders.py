"""Kernels on PyTorch tensors in the emulator: limits, refusals, faults, and the number of built kernels."""

from typing import Any

import pytest
import torch

import xent
from tests.metal.emulator.kernels import Emulator
from tests.metal.test_tensors import METAL, TARGETS, draw, outcome
from xent.backends.metal.torch_steps import MetalSteps
from xent.command.check.case import Case


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
    TARGETS[0].judge(case)


@pytest.mark.parametrize("limit", [0, 16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_failing_kernel_is_an_error_that_names_another_backend(emulator: Emulator, limit: int, reduction: str) -> None:
    emulator.limit = lambda source: limit
    logits, target = draw()
    upstream = torch.ones(6) if reduction == "none" else None
    with pytest.raises(xent.BackendError, match=r"does not run on this GPU: .* Backend 'torch' or 'mlx' serves"):
        outcome(logits, target, upstream, reduction=reduction, **METAL)


def test_a_kernel_is_compiled_once(emulator: Emulator) -> None:
    for vocabulary, rows in ((2100, 8), (4000, 30)):
        outcome(*draw(rows, vocabulary), z_loss=rows / 100, **METAL)
    assert len(emulator.sources) == 1


def test_memory_outside_the_results_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, launch = torch.full((12,), 7.0), MetalSteps._launch

    def watched(steps: MetalSteps, block: Any, index: Any, results: dict[str, torch.Tensor], *rest: Any) -> None:
        launch(steps, block, index, results | {"loss": memory[3:9]}, *rest)

    monkeypatch.setattr(MetalSteps, "_launch", watched)
    logits, target = draw()
    xent.cross_entropy(logits, target, **METAL)
    assert (memory != 7).nonzero().flatten().tolist() == list(range(3, 9))
