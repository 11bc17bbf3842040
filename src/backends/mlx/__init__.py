"""The MLX driver: calls on MLX arrays on any device of MLX, with the row kernel of that device.

Data flow of a call: `driver` -> `prepare` (flatten to rows) -> `facts` (the data of each row) -> the loop of `driver`
over parts of rows: `sources` (logits of a part, and the sums of gradients), the steps (its results and gradient) ->
`finish` (loss and statistics). `autograd` attaches gradients, and finds out which may be needed.

The steps of a loss call a row kernel with a block of logits (`kernels` defines its interface). The row kernel of this
backend is `plain`. It splits a block into smaller ones. `block` folds a block into sums. `finish` computes results and
gradient coefficients from the sums; only this step handles options. `block` computes the gradient from the
coefficients. `support` has the steps of rows with a support, in terms of a block too, and `divergence` those of
divergences.
"""

from typing import TYPE_CHECKING

from xent.backends.harness import Harness
from xent.core.arrays import dtype_name
from xent.core.call import Call, array_of
from xent.core.spec import BackendInfo, Stats

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["BACKEND", "MlxBackend"]


class MlxBackend:
    """Backend "mlx": every device MLX knows, with a row kernel made of MLX's own operations."""

    name = "mlx"
    framework = "mlx"
    native_to: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Import MLX. If the caller passes an MLX array, it is imported already."""
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

    def refuse(self, call: Call) -> str | None:
        """Refuse float64 on a GPU, where MLX does not support it."""
        from xent.backends.mlx.devices import device_type

        if dtype_name(array_of(call)) == "float64" and device_type() != "cpu":
            return "MLX computes float64 on the CPU alone: mx.set_default_device(mx.cpu), or cast to float32"
        return None

    def register(self) -> None:
        """Register the row kernel of this backend with the driver."""
        from xent.backends.mlx import plain  # noqa: F401

    def run(self, call: Call) -> "tuple[mx.array, Stats]":
        """Run the call in the MLX driver, with the row kernel of this backend."""
        from xent.backends.mlx import driver

        self.register()
        return driver.run(call, kernel=self.name)

    def harness(self, device: str | None = None) -> "Harness[mx.array]":
        """Return the MLX harness of the gradient checks."""
        from xent.backends.mlx.harness import MlxHarness

        return MlxHarness(device)


BACKEND = MlxBackend()
