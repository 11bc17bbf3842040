"""The Triton backend's harness for `python -m xent check`: kernel names, kernels that ran, and sizes."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.targets import backend_of
from xent.command.check.harnesses import harness_of


def test_kernels_that_the_profiler_saw_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = harness_of(backend_of("triton"), "cuda")
    first, second = harness.kernels[0], harness.kernels[-1]

    @contextmanager
    def profile(activities: Any, acc_events: bool) -> Any:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        events = [SimpleNamespace(key=key) for key in (first, f"{second}_0d1", "ampere_sgemm", "tile")]
        yield SimpleNamespace(key_averages=lambda: events)

    monkeypatch.setattr(torch.profiler, "profile", profile)
    with harness.watched() as seen:
        assert not seen
    assert seen == {first, second}


def test_the_interpreter_is_named_if_it_runs_the_kernels() -> None:
    harness = harness_of(backend_of("triton"), "cpu")
    with harness.watched() as seen:
        pass
    assert seen == set(harness.kernels) == {"Triton's interpreter"}
