"""The table of backends, best first. A new backend is one folder and one line here; nothing else names it."""

from importlib import import_module

from xent.backends.protocol import Backend

__all__ = ["TABLE", "load"]

TABLE = {
    "torch": "xent.backends.torch",
    "numpy": "xent.backends.reference",
}

_loaded: dict[str, Backend] = {}


def load(name: str) -> Backend:
    """Return the backend of that name out of `TABLE`; its module must not import its framework before it is used."""
    if name not in _loaded:
        _loaded[name] = import_module(TABLE[name]).BACKEND
    return _loaded[name]
