"""The PyTorch driver: both functions on tensors of any device, with the row kernel of that device.

How a call flows: `driver` makes the arguments ready (autocast, gradients asked for) -> `autograd` (what is saved, what
backward returns) -> `ops` (custom operations, opaque to torch.compile) -> `logits` or `linear` (the loop over chunks)
-> a row kernel (`plain` here) between `facts`, what is known about each row, and `results`, what is found out.
"""

from typing import Any

from xent.core.spec import BackendInfo, LinearCall, LogitsCall, Stats

__all__ = ["BACKEND", "TorchBackend"]


class TorchBackend:
    """Backend "torch": every device PyTorch knows, with a row kernel made of PyTorch's own operations."""

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

    def run(self, call: LogitsCall | LinearCall) -> tuple[Any, Stats]:
        """Run the call with the plain row kernel."""
        from xent.backends.torch import driver

        return driver.run(call, kernel=self.name)

    def harness(self, device: str | None = None) -> Any:
        """Return the PyTorch harness of the gradient checks."""
        from xent.backends.torch.harness import TorchHarness

        return TorchHarness(device)


BACKEND = TorchBackend()
