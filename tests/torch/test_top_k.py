"""The most probable classes in PyTorch: compiled, under autocast, of quantized classifiers, and without gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import xent
from tests.targets import Target


def pair(teacher: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return teacher.ids, teacher.log_probs


def arrays(target: Target, dtype: torch.dtype = torch.float32, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, rows, 8).to(target.device, dtype), torch.randn(90, 8).to(target.device, dtype)


@pytest.mark.parametrize("linear", [False, True])
def test_compiled_in_one_graph(target: Target, linear: bool) -> None:
    """It is one custom operation; other numbers of rows need no graph of their own."""
    counted = CompileCounterWithBackend("aot_eager")

    def call(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        named = {"temperature": 0.7, "backend": target.name}
        if linear:
            return pair(xent.linear_top_k(hidden, weight, 5, **named))
        return pair(xent.top_k(hidden @ weight.t() * 2, 5, **named))

    torch._dynamo.reset()
    compiled, graphs = torch.compile(call, backend=counted, fullgraph=True, dynamic=True), set[int]()
    for rows in (6, 4, 9):
        sources = arrays(target, rows=rows)
        for one, other in zip(compiled(*sources), call(*sources), strict=True):
            torch.testing.assert_close(one, other)
        graphs.add(counted.frame_count)
    assert len(graphs) == 1


def test_there_is_no_gradient(target: Target) -> None:
    hidden, weight = (array.requires_grad_() for array in arrays(target))
    for teacher in (
        xent.linear_top_k(hidden, weight, 5, backend=target.name),
        xent.top_k(hidden @ weight.t(), 5, backend=target.name),
    ):
        assert not teacher.log_probs.requires_grad
        assert teacher.ids.dtype == torch.int64


def test_without_values(target: Target) -> None:
    hidden, weight = arrays(target)
    with FakeTensorMode(allow_non_fake_inputs=True):
        teacher = xent.linear_top_k(hidden, weight, 5, backend=target.name)
    assert tuple(teacher.ids.shape) == tuple(teacher.log_probs.shape) == (2, 6, 5)


def test_autocast(target: Target) -> None:
    """The product has the dtype of autocast, and the logits are float32."""
    hidden, weight = arrays(target)
    with torch.autocast(target.device, torch.bfloat16):
        teacher = xent.linear_top_k(hidden, weight, 5, backend=target.name)
    narrow = xent.linear_top_k(hidden.bfloat16(), weight.bfloat16(), 5, backend=target.name)
    assert teacher.log_probs.dtype == torch.float32
    for one, other in zip(pair(teacher), pair(narrow), strict=True):
        assert torch.equal(one, other)


def test_a_quantized_classifier(target: Target) -> None:
    hidden, weight = arrays(target)
    packed = (weight * 40).round().to(torch.int8)
    head = xent.QuantizedRows(packed, (90, 8), lambda start, stop, dtype: packed[start:stop].to(dtype) / 40)
    call = partial(xent.linear_top_k, hidden, k=5, backend=target.name)
    for one, other in zip(pair(call(head)), pair(call(packed.float() / 40)), strict=True):
        torch.testing.assert_close(one, other)
