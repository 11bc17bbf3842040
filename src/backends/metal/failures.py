"""The error and the warning for a kernel that does not run on this GPU."""

import warnings

__all__ = ["KernelError", "warn_once"]

_warned: set[str] = set()


class KernelError(RuntimeError):
    """A kernel cannot run on this GPU with any number of threads; the message is the compiler's or the driver's."""


def warn_once(error: KernelError, framework: str) -> None:
    """Warn once that the framework's own operations replace a kernel that cannot run on this GPU, and why."""
    message = (
        f"a Metal kernel of xent does not run on this GPU, and {framework}'s operations take its place: {error}. "
        "Results stay correct; please report this with the output of python -m xent"
    )
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
