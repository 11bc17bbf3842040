"""A case's call on a backend, as tests of promises make it."""

from collections.abc import Callable
from typing import Any

import xent
from tests.targets import Target
from xent.core.check.cases import Case, Inputs
from xent.core.check.results import placed

__all__ = ["call_of"]


def call_of(target: Target, case: Case, inputs: Inputs, /, **more: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of the differentiable arrays, and those arrays on the device; `more` takes precedence."""
    options = placed(target.harness, inputs.options | {"target": inputs.target}, "float32") | case.keywords | more
    names = tuple(inputs.differentiable)

    def call(*arrays: Any) -> Any:
        named = dict(zip(names, arrays, strict=True))
        return getattr(xent, case.function)(**named, **options, backend=target.name)

    return call, target.arrays(*inputs.differentiable.values(), dtype=case.dtype)
