"""Backend "triton": kernels for NVIDIA GPUs, called by the PyTorch driver.

- `job` implements the driver's interface. It holds the `facts` (inputs) and `results` of a call's rows.
- Modules whose names end in "launch" or "launches", `tiles`, `shard_steps` and `shard_landing` launch kernels, with
  `launch` and `geometry`.
- `row_algebra`, `maths`, `row_memory` and `row_results` are functions that all kernels share.
- Logits in memory: `rows_kernel`, made of `row_fold` and `row_gradient`, and `gradient_kernel` for the backward pass.
  Rows with class probabilities use `probabilities_kernel`, rows with a support use `support_kernel`.
- Logits that are never stored: `tile_kernels`.
- Before and after the matrix products of a linear loss: `facts_kernels`, `linear_kernels`, `coefficients_kernel`.
- A vocabulary in shards: `shard_kernels`, `shard_land_kernels`, `shard_take_kernel`.
- Divergences: `divergence_kernel` and `top_k_kernel`, which share `divergence_maths` and `divergence_memory`.
- `hopper` contains two matrix products for Hopper GPUs.
"""

from typing import TYPE_CHECKING

from xent.backends.protocol import Harness
from xent.backends.torch import TorchBackend
from xent.core.arrays import dtype_name
from xent.core.spec import BackendInfo, LinearCall, LogitsCall
from xent.core.teachers import DivergenceCall

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BACKEND", "TritonBackend"]


class TritonBackend(TorchBackend):
    """Backend "triton": CUDA tensors, and CPU tensors if Triton interprets its kernels (TRITON_INTERPRET=1)."""

    name = "triton"
    native_to: tuple[str, ...] = ("cuda",)

    def missing(self) -> str | None:
        """Return the reason why Triton cannot be used on this machine, or None. It is determined once."""
        from xent.backends.triton.machine import MISSING

        return MISSING

    def info(self) -> BackendInfo:
        """Report the versions of Triton and PyTorch, and the device."""
        from xent.backends.triton.machine import DEVICES, MISSING, VERSIONS

        notes: tuple[str, ...] = ()
        if MISSING is None:
            from xent.backends.triton.hopper.door import fast_path

            notes = (fast_path(),)
        return BackendInfo(self.name, self.framework, MISSING is None, MISSING, VERSIONS, DEVICES, notes)

    def refuse(self, call: LogitsCall | LinearCall) -> str | None:
        """Refuse tensors on other devices, and float64, which these kernels would round to float32."""
        return self._refuse([call.logits] if isinstance(call, LogitsCall) else [call.input, call.linear_weight])

    def _refuse(self, arrays: "list[Tensor]") -> str | None:
        from xent.backends.triton.machine import DEVICES

        device = arrays[0].device.type
        if device not in (*DEVICES, "meta"):
            return f"it serves {' and '.join(DEVICES)} tensors and got a {device} tensor, which backend 'torch' serves"
        if "float64" in map(dtype_name, arrays):
            return "its kernels accumulate in float32 and would round float64, which backend 'torch' serves"
        return None

    def register(self) -> None:
        """Register the kernels with the PyTorch driver."""
        from xent.backends.triton import divergence_job, job, shard_steps  # noqa: F401

    def refuse_divergence(self, call: DivergenceCall) -> str | None:
        """Refuse the same tensors as for the losses."""
        return self._refuse([call.array])

    def harness(self, device: str | None = None) -> "Harness[Tensor]":
        """Return the harness of the gradient checks, without float64."""
        from xent.backends.triton.harness import TritonHarness

        return TritonHarness(device)


BACKEND = TritonBackend()
