"""A kernel that does not run on this GPU: the error, and the warning that says what takes its place."""

import warnings

__all__ = ["KernelError", "warn_once"]

_warned: set[str] = set()


class KernelError(RuntimeError):
    """Why a kernel does not run on this GPU at all."""


def warn_once(error: KernelError, framework: str) -> None:
    """Say that the framework's own operations take the place of a kernel that does not run here, and why."""
    message = (
        f"a Metal kernel of xent does not run on this GPU, and {framework}'s operations take its place: {error}. "
        "Results stay correct; please report this with the output of python -m xent"
    )
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
