"""Calls with several CPU threads. The other tests have one thread, so that parallel test processes do not compete."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.cases import FUNCTIONS
from tests.options import option_cases
from tests.targets import Target


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_threads(target: Target, function: str, dtype: str) -> None:
    """The logits have several blocks, each large enough for PyTorch to split it among threads."""
    for case in option_cases(function, dtype):
        if (case.name, case.reduction) in (("plain", "mean"), ("all", "none"), ("probabilities, all", "sum")):
            large = replace(case, rows=(3, 20), vocabulary=2503)
            target.judge(large)
