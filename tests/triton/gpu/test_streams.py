"""Kernels run on the caller's stream, wait for no other stream, and never make the host wait."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.triton.gpu.calls import CALLS, ONE_CHUNK, Call, run

LONG = 10**9  # clock cycles: about half a second, while the work takes microseconds
WITHOUT_WAITING = [call for call in CALLS if call.options.get("workspace") in (None, ONE_CHUNK["workspace"])]


def everything(call: Call, tensors: tuple[Tensor, ...]) -> None:
    """Run forward and backward, and the forward pass alone."""
    run(call, tensors)
    with torch.no_grad():
        call(*tensors)


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_synchronisation_is_detected() -> None:
    number = torch.ones((), device="cuda")
    with synchronisation_is_an_error(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        number.item()


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_waits_for_its_stream(call: Call) -> None:
    """The inputs are NaN until a long sleep on the stream is over, so code that does not wait for it reads NaN."""
    truth = call.draw(0)
    expected = run(call, truth)
    late = call.draw(1)
    with torch.no_grad():
        for tensor in late[:-1]:
            tensor.fill_(torch.nan)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG // 4)
        with torch.no_grad():
            for place, values in zip(late, truth, strict=True):
                place.copy_(values)
        found = run(call, late)
    side.synchronize()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_waits_for_no_other_stream(call: Call) -> None:
    tensors = call.draw(0)
    expected = run(call, tensors)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(call, tensors)  # allocates memory on this stream before the other one is busy
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    busy = torch.cuda.Event()
    busy.record()
    with torch.cuda.stream(side):
        found = run(call, tensors)
    side.synchronize()
    assert not busy.query(), "the default stream's sleep was waited for"
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_pytorch_sees_no_synchronisation(call: Call) -> None:
    tensors = call.draw(0)
    everything(call, tensors)
    with synchronisation_is_an_error():
        everything(call, tensors)


@pytest.mark.parametrize("call", WITHOUT_WAITING, ids=str)
def test_host_runs_ahead(call: Call) -> None:
    """The device sleeps. Forward and backward are queued behind, and the host continues."""
    tensors = call.draw(0)
    everything(call, tensors)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    slept = torch.cuda.Event()
    slept.record()
    everything(call, tensors)
    assert not slept.query(), "the host waited for the device"


def test_device_is_busy_while_the_host_waits_for_the_number_of_rows() -> None:
    """The host may wait for that number during the first of several chunks. Then it is ahead of the device again."""
    call = Call("linear_cross_entropy", {"workspace": 2048 * 32000 * 2})
    torch.manual_seed(0)
    hidden = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(32000, (8192,), device="cuda")
    target[::9] = -100
    run(call, (hidden, weight, target))
    torch.cuda.synchronize()
    run(call, (hidden, weight, target))
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the host came last"
