"""Patches that make Triton's interpreter faster: shapes are derived once, not for each value, and checks are left out.

Triton's functions for types are written for a compiler. In an interpreted kernel they take most of the time.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

__all__ = ["prepare_types"]


def prepare_types() -> None:
    """Install the patches."""
    from triton.language import core
    from triton.runtime import interpreter

    _check_no_overflow(interpreter.interpreter_builder)
    _remember_shapes(core)
    interpreter._patch_attr = _called_directly(interpreter._patch_attr)


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


def _called_directly(patch: Callable[..., Any]) -> Callable[..., Any]:
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
