"""The PyTorch driver: all functions for tensors of any device, with the steps of that device's backend.

Data flow of a call: `planned` (its plan) -> `prepare` (rows) -> `function` (autograd) -> the passes of `loop` over the
parts of the rows, with `sources` and `products` -> the steps of a backend, which `contract` describes. A call without a
signature, for example under a tracer, goes from `entry` through `operations`, custom operations that run the rest. The
steps of this backend are `portable`, in PyTorch's own operations. `shards` has what a vocabulary in shards needs.
"""

from typing import TYPE_CHECKING

from xent.core.call import Call
from xent.core.spec import BackendInfo, Stats

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BACKEND", "TorchBackend"]

_MISSING = None
try:
    import torch  # noqa: F401
except ImportError as error:
    _MISSING = f"PyTorch cannot be imported: {error}"


class TorchBackend:
    """Backend "torch": every device PyTorch knows, with steps made of PyTorch's own operations."""

    name = "torch"
    framework = "torch"
    native_to: tuple[str, ...] = ("cpu",)
    missing: str | None = _MISSING

    def info(self) -> BackendInfo:
        """Report PyTorch's version and devices."""
        if self.missing is not None:
            return BackendInfo(self.name, self.framework, False, self.missing, {}, ())
        from xent.backends.torch.devices import devices, version

        return BackendInfo(self.name, self.framework, True, None, {"torch": version()}, devices())

    def refuse(self, call: Call) -> str | None:
        """Refuse nothing: this backend supports every option and every device."""
        return None

    def load(self) -> None:
        """Import the module that registers the steps of this backend."""
        from xent.backends.torch.portable import steps  # noqa: F401

    def run(self, call: Call) -> "tuple[Tensor, Stats]":
        """Run a call that has no plan, with the steps of this backend."""
        from xent.backends.torch import entry

        self.load()
        return entry.run(call, self.name)

    def top_k(self, call: Call) -> "tuple[Tensor, Tensor]":
        """Return the most probable classes and their log-probabilities."""
        from xent.backends.torch import entry

        self.load()
        return entry.run_top_k(call, self.name)


BACKEND = TorchBackend()
