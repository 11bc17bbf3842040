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


def test_pointers_are_not_promoted() -> None:
    pointer = value(tl.pointer_type(tl.float32), (4,))
    patched = TritonSemantic.binary_op_type_checking_impl
    for other in (value(tl.int32, (4,)), value(tl.float32, (4,)), pointer, value(tl.pointer_type(tl.int8), (4,)), 2):
        for allowed in (False, True):
            operands = (pointer, other, allowed, allowed)
            assert outcome(patched, *operands) == outcome(patched.__wrapped__, *operands)


def test_values_are_broadcast_as_without_the_patches() -> None:
    patched = TritonSemantic.broadcast_impl_value
    for left, right in product(SHAPES, repeat=2):
        operands = value(tl.float32, left), value(tl.int32, right)
        assert outcome(patched, *operands) == outcome(patched.__wrapped__, *operands)


def test_types_with_the_same_sizes_are_equal_and_others_are_not() -> None:
    types = [core.block_type(kind, list(shape)) for kind, shape in product(KINDS, SHAPES[1:])]
    types += [kind.with_element_ty(tl.pointer_type(kind.scalar)) for kind in types]
    types += KINDS
    for (place, one), (other_place, other) in product(enumerate(types), repeat=2):
        assert bool(one == other) == (place == other_place) == (one.name == other.name)
    for shape in (types[0].shape, [4], [core.constexpr(4)]):
        made = core.block_type(tl.float32, shape)
        assert (made.name, list(made.shape), made.numel) == ("<['4'], fp32>", [4], 4)
        assert [size.value for size in value(tl.float32, (4,)).shape] == [4]
    patched = core.dtype.__eq__
    for other in (core.constexpr(tl.float32), core.constexpr(tl.int32), "fp32"):  # Triton 3.4 unwraps no constant
        assert patched(tl.float32, other) == patched.__wrapped__(tl.float32, other)


def test_constants_are_unwrapped() -> None:
    patched = core._unwrap_if_constexpr
    block = value(tl.float32, (4,))
    assert patched(block) is block
    for given in (3, 2.5, True, None, "name", core.constexpr(3), [core.constexpr(1), 2], (core.constexpr(1), (2,))):
        assert repr(patched(given)) == repr(patched.__wrapped__(given))
        assert type(patched(given)) is type(patched.__wrapped__(given))
