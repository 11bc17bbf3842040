"""The PyTorch driver: both functions on tensors of any device, with the steps of that device's backend.

How a call flows: `driver` makes the arguments ready (autocast, gradients asked for) -> `eager`, or for compilers,
transforms and modes `autograd` and `ops` (what is saved, what backward returns) -> `logits` or `linear` (the loop over
chunks) -> a `job`, the rows of the call: `plain_job` here, made of PyTorch's own operations.
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
        """Import PyTorch, which whoever passes a tensor has already done."""
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
        """Refuse nothing: there is no option and no device that this backend leaves out."""
        return None

    def run(self, call: LogitsCall | LinearCall) -> "tuple[Tensor, Stats]":
        """Run the call with plain jobs."""
        from xent.backends.torch import driver, plain_job  # noqa: F401  registers the job

        return driver.run(call, kernel=self.name)

    def refuse_divergence(self, call: DivergenceCall) -> None:
        """Refuse nothing."""

    def run_divergence(self, call: DivergenceCall) -> "tuple[Tensor, Stats]":
        """Run a divergence with plain steps."""
        from xent.backends.torch import plain_job  # noqa: F401  registers what scales gradients
        from xent.backends.torch.divergence import entry

        return entry.run(call, kernel=self.name)

    def harness(self, device: str | None = None) -> "Harness[Tensor]":
        """Return the PyTorch harness of the gradient checks."""
        from xent.backends.torch.harness import TorchHarness

        return TorchHarness(device)


BACKEND = TorchBackend()
