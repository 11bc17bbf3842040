"""`Target`: a backend on a device, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from xent.backends import TABLE
from xent.backends.protocol import Backend
from xent.command.check.case import Case
from xent.command.check.harness import Harness
from xent.command.check.harnesses import harness_of
from xent.command.check.judge import judge_case


@dataclass(frozen=True)
class Target:
    name: str
    device: str
    framework: str = ""
    """If two frameworks have a backend of this name: which. By default the first in the table."""

    def __str__(self) -> str:
        return f"{self.name}-{self.device}"

    @property
    def backend(self) -> Backend:
        return backend_of(self.name, self.framework)

    @cached_property
    def harness(self) -> Harness[Any]:
        return harness_of(self.backend, self.device)

    def takes(self, dtype: str) -> bool:
        """Whether the backend supports the dtype. A backend for accelerators may refuse float64, but no other dtype."""
        takes = dtype in self.harness.dtypes
        assert takes or dtype == "float64"
        return takes

    @property
    def looks_at_targets(self) -> bool:
        """Whether target values are checked by default. MLX, which is lazy, does not check them on any device."""
        return self.device == "cpu" and self.backend.framework == "torch"

    @property
    def interpreted(self) -> bool:
        """Whether an interpreter runs each row as a separate program, a thousand times slower than a GPU."""
        return self.name == "triton" and self.device == "cpu"

    @property
    def slow(self) -> bool:
        """Whether the kernels are interpreted or emulated."""
        return self.device == "cpu" and self.name in ("metal", "triton")

    def sized(self, case: Case) -> Case:
        """Return the case, with fewer rows and larger tiles if kernels are interpreted."""
        if not self.interpreted:
            return case
        rows = tuple(min(size, 4) for size in case.rows)
        return replace(case, rows=rows, workspace=case.workspace and max(case.workspace, 134))

    def arrays(self, *values: Any, dtype: str = "float32") -> tuple[Any, ...]:
        """Return NumPy arrays as arrays on the device, floats as `dtype`."""
        return tuple(self.harness.array(value, dtype if value.dtype.kind == "f" else None) for value in values)

    def judge(self, case: Case, seed: int = 0, workspace: int | None = None) -> None:
        """Expect results and gradients of a case within their bounds, compared with the reference."""
        for comparison in judge_case(self.backend, self.harness, case, seed, workspace):
            assert comparison.passed, comparison

    def numbers(self, values: Any) -> Any:
        """Return an array of the framework as a NumPy array, and anything else as it is."""
        is_placed = hasattr(values, "dtype") and not isinstance(values, np.ndarray | np.generic)
        return self.harness.numpy(values) if is_placed else values

    def close(self, found: Any, expected: Any, **close: Any) -> None:
        """Compare arrays of the framework or of NumPy, with the tolerances of NumPy's assert_allclose."""
        np.testing.assert_allclose(self.numbers(found), self.numbers(expected), **close)

    def same(self, found: Any, expected: Any, **more: Any) -> None:
        """Expect equal arrays of the framework or of NumPy."""
        np.testing.assert_array_equal(self.numbers(found), self.numbers(expected), **more)

    @contextmanager
    def poisoned(self) -> Iterator[None]:
        """Fill uninitialised memory with NaN."""
        if self.backend.framework == "mlx":  # MLX initialises all memory; only its default device must be set
            import mlx.core as mx

            with mx.stream(getattr(mx, self.device)):
                yield
            return
        if self.backend.framework != "torch":
            yield
            return
        import torch

        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        assert torch.utils.deterministic.fill_uninitialized_memory
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def backend_of(name: str, framework: str = "") -> Backend:
    """Return the backend of that name, and of that framework if one is named."""
    return next(load() for (one, takes), load in TABLE.items() if one == name and framework in ("", takes))


def targets(name: str) -> list[Target]:
    """Return the targets of the backend, one per device."""
    return [Target(name, device) for device in backend_of(name).info().devices]
