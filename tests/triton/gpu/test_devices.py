"""Tensors on a GPU other than the current one are computed on their own device."""

import pytest
import torch

from tests.triton.gpu.calls import CALLS, Call, run


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_device_is_that_of_the_tensors(call: Call) -> None:
    expected = run(call, call.draw(0, "cuda:0"))
    assert torch.cuda.current_device() == 0
    found = run(call, call.draw(0, "cuda:1"))
    assert torch.cuda.current_device() == 0
    for one, other in zip(found, expected, strict=True):
        assert one.device == torch.device("cuda:1")
        assert torch.equal(one.cpu(), other.cpu())
