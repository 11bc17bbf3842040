"""Launches that Triton does not look at: they run what was compiled for arguments of their kind, and no other."""

from itertools import combinations
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import native_specialize_impl

from xent.backends.triton.launch import _kind, cdiv, next_power_of_2

ARGUMENTS: list[Any] = [
    None,
    True,
    1.5,
    *(0, 1, -1, 16, 17, -100, 2**31 - 1, 2**31, 2**40 + 1, -(2**31) - 1),
    *(torch.zeros(8, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool)),
    torch.zeros(8)[1:],
    torch.zeros(8)[4:],
    torch.zeros(8, dtype=torch.int64)[1:],
]


def compiled_for(argument: Any) -> Any:
    """Return what Triton itself compiles for."""
    return native_specialize_impl(CUDABackend, argument, False, True, True)


def test_arguments_of_one_kind_are_one_to_triton() -> None:
    pairs = [pair for pair in combinations(ARGUMENTS, 2) if _kind(pair[0]) == _kind(pair[1])]
    assert len(pairs) >= 4
    for one, other in pairs:
        assert compiled_for(one) == compiled_for(other), (one, other)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 32, 33, 2**40, 2**40 + 1])
def test_sizes(count: int) -> None:
    assert cdiv(count, 32) == triton.cdiv(count, 32)
    assert next_power_of_2(count) == max(triton.next_power_of_2(count), 1)
