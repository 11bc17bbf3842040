"""The row kernels that the PyTorch driver can use, by backend name."""

from importlib import import_module

from xent.backends.protocol import RowKernel

__all__ = ["row_kernel"]

_MODULES = {"torch": ("xent.backends.torch.plain", "PlainPass")}


def row_kernel(name: str) -> RowKernel:
    """Return the row kernel of that name."""
    module, attribute = _MODULES[name]
    kernel: RowKernel = getattr(import_module(module), attribute)
    return kernel
