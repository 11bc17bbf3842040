"""The MLX driver: both functions on MLX arrays, on any device that MLX has, with the row kernel of that device.

How a call flows: `driver` makes the arguments ready -> `facts`, what is known about each row -> `logits`, or `linear`
with its loop over chunks -> a row kernel (`plain` here; `kernels` is the contract) -> `results`, the loss and the
statistics -> `autograd`, which gives the loss its gradients. `tracing` tells which gradients may be asked for. A call
of no rows goes from `driver` to `empty` and no further.
"""

from typing import Any

from xent.core.arrays import dtype_name
from xent.core.spec import BackendInfo, LinearCall, LogitsCall, Stats

__all__ = ["BACKEND", "MlxBackend"]


class MlxBackend:
    """Backend "mlx": every device MLX knows, with a row kernel made of MLX's own operations."""

    name = "mlx"
    framework = "mlx"
    native_to: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Import MLX, which whoever passes an MLX array has already done."""
        try:
            import mlx.core  # noqa: F401
        except ImportError as error:
            return f"MLX cannot be imported: {error}"
        return None

    def info(self) -> BackendInfo:
        """Report MLX's version and devices."""
        reason = self.missing()
        if reason is not None:
            return BackendInfo(self.name, self.framework, False, reason, {}, ())
        from xent.backends.mlx.devices import devices, version

        return BackendInfo(self.name, self.framework, True, None, {"mlx": version()}, devices())

    def refuse(self, call: LogitsCall | LinearCall) -> str | None:
        """Refuse float64 on a GPU, where MLX has none."""
        from xent.backends.mlx.devices import device_type

        array = call.logits if isinstance(call, LogitsCall) else call.input
        if dtype_name(array) == "float64" and device_type() != "cpu":
            return "MLX computes float64 on the CPU alone: mx.set_default_device(mx.cpu), or cast to float32"
        return None

    def run(self, call: LogitsCall | LinearCall) -> tuple[Any, Stats]:
        """Run the call with the plain row kernel."""
        from xent.backends.mlx import driver

        return driver.run(call, kernel=self.name)

    def harness(self, device: str | None = None) -> Any:
        """Return the MLX harness of the gradient checks."""
        from xent.backends.mlx.harness import MlxHarness

        return MlxHarness(device)


BACKEND = MlxBackend()
