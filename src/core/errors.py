"""The exception of xent: no backend can serve the call."""

__all__ = ["BackendError"]


class BackendError(RuntimeError):
    """The named backend, or every backend, cannot serve this call. The message says why, and what could."""
