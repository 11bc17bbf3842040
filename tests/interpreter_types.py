"""Patches that make Triton's interpreter faster: types, shapes and promotions are derived once, not for each value.

Triton's functions for types are written for a compiler. In an interpreted kernel they take nine tenths of the time, and
NumPy one tenth. With the patches, types and values are the same: `tests/triton/test_interpreter.py` compares them with
those of the functions that are replaced.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

__all__ = ["prepare_types"]

Function = Callable[..., Any]


def prepare_types() -> None:
    """Install the patches."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    _check_no_overflow(interpreter.interpreter_builder)
    _remember_shapes(core)
    core.dtype.__eq__ = _compared(core.dtype.__eq__)
    core._unwrap_if_constexpr = _unwrapped(core._unwrap_if_constexpr)
    interpreter._patch_attr = _called_directly(interpreter._patch_attr)
    kinds = semantic.TritonSemantic
    kinds.computation_type_impl = _promoted(kinds.computation_type_impl)
    kinds.binary_op_type_checking_impl = _checked(kinds.binary_op_type_checking_impl)
    kinds.broadcast_impl_value = _broadcast(kinds.broadcast_impl_value)


def _check_no_overflow(builder: Any) -> None:
    """Do not compute whether an integer overflows, if the assertion that would say so is switched off."""
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _remember_shapes(core: Any) -> None:
    """Keep one object per shape of blocks, with its number of elements and the shape of values."""
    make_type, make_value = core.block_type.__init__, core.tensor.__init__
    by_sizes = {}
    by_shape = {}
    of_values = {}

    def initialize_type(self: Any, element_ty: Any, shape: Any) -> None:
        known = by_shape.get(id(shape))
        if known is None:
            make_type(self, element_ty, shape)
            known = by_sizes.setdefault(tuple(self.shape), (self.shape, self.numel, str(self.shape)))
            by_shape[id(known[0])] = known
            self.shape = known[0]
        else:
            self.element_ty = element_ty
            self.shape, self.numel, text = known
            self.name = f"<{text}, {element_ty.name}>"

    def initialize_value(self: Any, handle: Any, type: Any) -> None:
        shape = id(type.shape) if type.is_block() else 0
        if shape in of_values:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = of_values[shape]
        else:
            make_value(self, handle, type)
            if not shape or shape in by_shape:
                of_values[shape] = self.numel, self.shape

    core.block_type.__init__ = initialize_type
    core.tensor.__init__ = initialize_value


def _compared(equal: Function) -> Function:
    """Return `dtype.__eq__` without a search for constants in two types."""
    from triton.language.core import dtype

    @wraps(equal)
    def same(self: Any, other: Any) -> bool:
        return self.name == other.name if isinstance(other, dtype) else equal(self, other)

    return same


def _unwrapped(unwrap: Function) -> Function:
    """Return `_unwrap_if_constexpr` which returns values and numbers at once."""
    from triton.language.core import constexpr, tensor

    plain = {bool, float, int, str, tensor, type(None)}

    @wraps(unwrap)
    def value_of(given: Any) -> Any:
        kind = type(given)
        if kind in plain:
            return given
        return given.value if kind is constexpr else unwrap(given)

    return value_of


def _called_directly(patch: Function) -> Function:
    """Return `_patch_attr` whose functions call a builtin without the check that they are in a kernel."""
    from triton.language import core
    from triton.runtime.interpreter import interpreter_semantic

    check = core.builtin(lambda: None).__code__

    def patch_attribute(where: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        """`scope` restores the language after a launch. Triton 3.4 has none."""
        if getattr(member, "__code__", None) is not check:
            patch(where, name, member, builder, *scope)
            return
        function = member.__wrapped__

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter_semantic
            return function(*args, **kwargs)

        if scope:
            scope[0].set_attr(where, name, call)
        else:
            setattr(where, name, call)

    return patch_attribute


def _promoted(promote: Function) -> Function:
    """Return `computation_type_impl` with a cache."""
    known = {}

    @wraps(promote)
    def remembered(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in known:
            known[key] = promote(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    return remembered


def _checked(check: Function) -> Function:
    """Return `binary_op_type_checking_impl` which only broadcasts two values of one type that needs no promotion."""
    from triton.language.core import tensor

    kept = {"fp64", "fp32", "fp16", "bf16", "int64", "int32", "int16", "int8", "int1"}

    @wraps(check)
    def of_one_type(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if type(lhs) is tensor and type(rhs) is tensor and len(args) < 3 and not kwargs:
            name = lhs.dtype.name
            if name == rhs.dtype.name and name in kept:
                return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *args, **kwargs)

    return of_one_type


def _broadcast(broadcast: Function) -> Function:
    """Return `broadcast_impl_value` which returns values of one shape at once."""

    @wraps(broadcast)
    def of_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return of_one_shape
