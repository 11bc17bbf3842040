"""Backend "triton": row kernels for NVIDIA GPUs, which the PyTorch driver calls in place of its plain one.

`machine` says whether this machine can run them, `hopper` whether those that are for one chip; `kernels` is what the
driver takes. `facts`, `order`, `rows`, `ring`, `tiles`, `product`, `exponentials` and `steps` launch kernels, one file
a purpose; those of `rows`, `ring`, `tiles`, `product` and `exponentials` are in `rows_kernel`, `ring_kernel` (with
`ring_parts`), `tile_kernels`, `product_kernel` and `exponentials_kernel` (with `product_parts`; and
`exponential_steps`), and `maths` is what kernels share. `launch` is how all of them are launched.
"""

from typing import Any

from xent.core.arrays import dtype_name
from xent.core.spec import BackendInfo, LinearCall, LogitsCall, Stats

__all__ = ["BACKEND", "TritonBackend"]


class TritonBackend:
    """Backend "triton": CUDA tensors, and CPU tensors where Triton interprets its kernels (TRITON_INTERPRET=1)."""

    name = "triton"
    framework = "torch"
    native_to: tuple[str, ...] = ("cuda",)

    def missing(self) -> str | None:
        """Return what was found when this machine was first looked at."""
        from xent.backends.triton.machine import MISSING

        return MISSING

    def info(self) -> BackendInfo:
        """Report the versions of Triton and PyTorch, and the device."""
        from xent.backends.triton.machine import DEVICES, MISSING, VERSIONS

        return BackendInfo(self.name, self.framework, MISSING is None, MISSING, VERSIONS, DEVICES)

    def refuse(self, call: LogitsCall | LinearCall) -> str | None:
        """Refuse other devices, and float64, which these kernels would round to float32."""
        from xent.backends.triton.machine import DEVICES

        arrays = [call.logits] if isinstance(call, LogitsCall) else [call.input, call.linear_weight]
        device = arrays[0].device.type
        if device not in (*DEVICES, "meta"):
            return f"it serves {' and '.join(DEVICES)} tensors and got a {device} tensor, which backend 'torch' serves"
        if "float64" in map(dtype_name, arrays):
            return "its kernels accumulate in float32 and would round float64, which backend 'torch' serves"
        return None

    def run(self, call: LogitsCall | LinearCall) -> tuple[Any, Stats]:
        """Run the call in the PyTorch driver with these row kernels."""
        from xent.backends.torch import driver

        return driver.run(call, kernel=self.name)

    def harness(self, device: str | None = None) -> Any:
        """Return the PyTorch harness of the gradient checks, without float64."""
        from xent.backends.torch.harness import TorchHarness
        from xent.backends.triton.machine import DEVICES

        harness = TorchHarness(device or DEVICES[0])
        harness.dtypes = tuple(dtype for dtype in harness.dtypes if dtype != "float64")
        return harness


BACKEND = TritonBackend()
