"""The MLX driver: calls on MLX arrays on any device of MLX, with the row kernel of that device.

Data flow of a call: `driver` -> `facts` (flatten to rows; the data of each row) -> the loop of `driver` over parts of
rows: `sources` (logits of a part, and the sums of gradients), the row kernel (its results and gradient; `kernels`
defines the interface) -> `driver` (loss and statistics). `autograd` attaches gradients, and finds out which may be
needed.

The row kernel of this backend is `plain`. It splits a block of logits into smaller ones. `block` folds a block into
sums. `kernels` has the `finish` that computes results and gradient coefficients from the sums; only this step handles
options. `block` computes the gradient from the coefficients. `divergence` is the row kernel of divergences.
"""

from typing import TYPE_CHECKING

from xent.core.call import Call, array_of, dtype_name
from xent.core.spec import BackendInfo, Stats

if TYPE_CHECKING:
    import mlx.core as mx

    from xent.backends.mlx.kernels import RowKernel

__all__ = ["BACKEND", "MlxBackend"]


class MlxBackend:
    """Backend "mlx": every device MLX knows, with a row kernel made of MLX's own operations."""

    name = "mlx"
    framework = "mlx"
    native_to: tuple[str, ...] = ()

    @property
    def missing(self) -> str | None:
        """Import MLX. If the caller passes an MLX array, it is imported already."""
        try:
            import mlx.core  # noqa: F401
        except ImportError as error:
            return f"MLX cannot be imported: {error}"
        return None

    def info(self) -> BackendInfo:
        """Report MLX's version and devices."""
        reason = self.missing
        if reason is not None:
            return BackendInfo(self.name, self.framework, False, reason, {}, ())
        from xent.backends.mlx.devices import version

        return BackendInfo(self.name, self.framework, True, None, {"mlx": version()}, self.devices())

    def devices(self) -> tuple[str, ...]:
        """Return the device types that this backend serves, the best one first."""
        import mlx.core as mx

        return ("gpu", "cpu") if mx.is_available(mx.gpu) else ("cpu",)

    def refuse(self, call: Call) -> str | None:
        """Refuse float64 on a GPU, where MLX does not support it."""
        from xent.backends.mlx.devices import device_type

        if dtype_name(array_of(call)) == "float64" and device_type() != "cpu":
            return "MLX computes float64 on the CPU alone: mx.set_default_device(mx.cpu), or cast to float32"
        return None

    def kernel(self) -> "RowKernel":
        """Return the row kernel: see `xent.backends.mlx.kernels`."""
        from xent.backends.mlx import plain

        return plain

    def run(self, call: Call) -> "tuple[mx.array, Stats]":
        """Run the call in the MLX driver, with the row kernel of this backend."""
        from xent.backends.mlx import driver

        return driver.run(call, self.kernel())

    def top_k(self, call: Call) -> "tuple[mx.array, mx.array]":
        """Return the most probable classes and their log-probabilities, in MLX's own operations on all devices."""
        from xent.backends.mlx import top_k

        return top_k.run(call)


BACKEND = MlxBackend()
