"""The PyTorch driver: the losses for tensors of any device, with the steps of that device's backend.

Data flow of a call: `driver` prepares the arguments (autocast, which gradients are needed) -> `eager` (autograd), or
`autograd` and `ops` (custom operations) for compilers, transforms and modes -> `logits` or `linear` (the loop over
chunks) -> a `job`, which computes the rows of the call. The job of this backend is `plain_job`, made of PyTorch's own
operations.
"""

from typing import TYPE_CHECKING

from xent.backends.protocol import Harness
from xent.core.spec import BackendInfo, LinearCall, LogitsCall, Stats
from xent.core.teachers import DivergenceCall

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BACKEND", "TorchBackend"]


class TorchBackend:
    """Backend "torch": every device PyTorch knows, with steps made of PyTorch's own operations."""

    name = "torch"
    framework = "torch"
    native_to: tuple[str, ...] = ("cpu",)

    def missing(self) -> str | None:
        """Import PyTorch. If the caller passes a tensor, it is imported already."""
        try:
            import torch  # noqa: F401
        except ImportError as error:
            return f"PyTorch cannot be imported: {error}"
        return None

    def info(self) -> BackendInfo:
        """Report PyTorch's version and devices."""
        reason = self.missing()
        if reason is not None:
            return BackendInfo(self.name, self.framework, False, reason, {}, ())
        from xent.backends.torch.devices import devices, version

        return BackendInfo(self.name, self.framework, True, None, {"torch": version()}, devices())

    def refuse(self, call: LogitsCall | LinearCall) -> str | None:
        """Refuse nothing: this backend supports every option and every device."""
        return None

    def register(self) -> None:
        """Register the job and the steps of this backend with the driver."""
        from xent.backends.torch import plain_job  # noqa: F401

    def run(self, call: LogitsCall | LinearCall) -> "tuple[Tensor, Stats]":
        """Run the call in the PyTorch driver, with the jobs of this backend."""
        from xent.backends.torch import driver

        self.register()
        return driver.run(call, kernel=self.name)

    def refuse_divergence(self, call: DivergenceCall) -> str | None:
        """Refuse nothing."""
        return None

    def run_divergence(self, call: DivergenceCall) -> "tuple[Tensor, Stats]":
        """Run a divergence in the PyTorch driver, with the steps of this backend."""
        from xent.backends.torch.divergence import entry

        self.register()
        return entry.run(call, kernel=self.name)

    def harness(self, device: str | None = None) -> "Harness[Tensor]":
        """Return the PyTorch harness of the gradient checks."""
        from xent.backends.torch.harness import TorchHarness

        return TorchHarness(device)


BACKEND = TorchBackend()
