"""The one error type of our own: a backend that was asked for and cannot serve the call."""

__all__ = ["BackendError"]


class BackendError(RuntimeError):
    """No backend, or not the named one, can serve this call. The message says why and what would."""
