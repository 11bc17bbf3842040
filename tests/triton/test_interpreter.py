"""The patches of `tests/interpreter_types.py` give the types and values of the functions that they replace."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

KINDS = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64)
SHAPES = ((), (4,), (1, 4), (2, 4), (4, 2), (2, 1), (8,))


def value(kind: Any, shape: tuple[int, ...]) -> Any:
    data = np.arange(np.prod(shape, dtype=int)).reshape(shape or (1,)).astype(interpreter._get_np_dtype(kind))
    return core.tensor(interpreter.TensorHandle(data, kind), core.block_type(kind, list(shape)) if shape else kind)


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the types and values that the function returns, or its error."""
    try:
        returned = function(interpreter.interpreter_semantic, *arguments)
    except Exception as error:
        return repr(error)
    return [(str(found.type), found.handle.data.dtype, found.handle.data.tolist()) for found in returned]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_operands_are_promoted_and_broadcast_as_without_the_patches(kind: Any) -> None:
    patched = TritonSemantic.binary_op_type_checking_impl
    others = [value(other, shape) for other, shape in product(KINDS, SHAPES)] + [3, -1, 300, 2.5, 1e300, True]
    for shape, other, division in product(SHAPES, others, (False, True)):
        pairs = (value(kind, shape), other), (other, value(kind, shape))
        for operands in pairs:
            more = (False, False, True, division)
            assert outcome(patched, *operands, *more) == outcome(patched.__wrapped__, *operands, *more)
            assert outcome(patched, *operands) == outcome(patched.__wrapped__, *operands)


def test_types_are_promoted_as_without_the_patches() -> None:
    patched = TritonSemantic.computation_type_impl
    for arguments in product(KINDS, (False, True), KINDS, (False, True), (False, True)):
        assert promotion(patched, *arguments) == promotion(patched.__wrapped__, *arguments)


def promotion(function: Callable[..., Any], *arguments: Any) -> str:
    try:
        return str(function(interpreter.interpreter_semantic, *arguments))
    except TypeError as error:
        return repr(error)
