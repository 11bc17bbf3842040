"""A launch is compiled once for each kind of arguments, which says all that Triton compiles it for."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import xent
from tests.targets import Target
from xent.backends.triton.launches import Launch, Rows


@pytest.mark.parametrize("is_operation", [False, True])
def test_kind_tells_the_alignment_of_class_weights(
    target: Target, is_operation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both weights begin 4 bytes after a multiple of 16. One is contiguous, and kernels read a copy of the other."""
    seen: dict[object, list[object]] = {}
    called = Launch.__call__

    def record(launch: Launch, kind: object, programs: int, *arguments: Any) -> None:
        groups = [argument for argument in arguments if isinstance(argument, Rows)]
        aligned = [None if member is None else member.data_ptr() % 16 == 0 for group in groups for member in group]
        assert seen.setdefault((launch, kind), aligned) == aligned
        called(launch, kind, programs, *arguments)

    monkeypatch.setattr(Launch, "__call__", record)
    logits, memory = torch.randn(3, 40, device=target.device), torch.rand(84, device=target.device)
    classes = torch.arange(3, device=target.device)
    for weight in (memory[1:81:2], memory[1:41]):
        assert weight.data_ptr() % 16 == 4
        leaf = logits.clone().requires_grad_()
        with FlopCounterMode(display=False) if is_operation else torch.enable_grad():
            loss = xent.cross_entropy(leaf, classes, weight=weight, label_smoothing=0.1, backend="triton")
        loss.backward()
    assert len(seen) > 1
