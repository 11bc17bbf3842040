"""Backend "metal": row kernels for Apple GPUs, which the drivers of MLX and PyTorch call in place of their plain ones.

The kernels are Metal sources, and a threadgroup has one row. `forward.metal` and `backward.metal` are their bodies, and
lean on `loss.metal` and `gradient.metal`, these on `call.metal` (what a launch is about), `sums.metal` (what a loss is
made of, in one read), `columns.metal` (who reads which 16 bytes) and `maths.metal`. `threads` says how a row is shared
out, `sources` puts the texts together, and there are two launchers:

- MLX writes the signatures; `contiguous.metal` says where rows lie. `machine` says whether this machine has Metal,
  `rows` launches, and registers that with the driver; `limits` tries each kernel before it enters a graph.
- For PyTorch `forward_signature.metal` and `backward_signature.metal` are the signatures. `torch_machine`,
  `torch_job` and `tensors` do the same; `torch_backend` is the backend, and `proof` remembers a check that passed.

With x, e, w, a as in `xent.cross_entropy`, r the row's factor of the gradient, and W = sum_c w_c::

    log p = x - max x - log sum_c exp(x_c - max x)
    l     = a [ (1-e) w_y (-log p_y) + (e/V) sum_c w_c (-log p_c) + zeta lse^2 ]
    dl/dz = r [ ((1-e) w_y + (e/V) W + 2 zeta lse) p - (1-e) w_y [c==y] - (e/V) w_c ] dx/dz

For class probabilities q, w_c ((1-e) q_c + e/V) stands for both shares of class c, and their sum for the bracket's
first two terms. What has no share is 0 even where its log p is -inf. With reduction "none" the backward kernel adds
u p + n (p - [c==y]) - v p (log p + H) to dl/dx, for gradients u of lse, n of nll and v of the entropy H. A temperature
of each row is a scale and a softcap of each row.

Rows that may take some classes only, those of a support, are no kernel's: the frameworks' own operations serve them
(`xent.backends.mlx.supported`, `xent.backends.torch.sampled`), on what is gathered from the logits.

A loss alone reads the logits once. A loss with its gradient reads them once and writes once where a row fits into the
threadgroup's registers, which is 64 KiB: 32768 classes of 16 bits, 16384 of float32. Of a longer row the rest is read
again, last part first, while it may still be in the caches that the GPU's cores share.
"""

from typing import TYPE_CHECKING

from xent.backends.protocol import Harness
from xent.core.arrays import dtype_name
from xent.core.spec import BackendInfo, LinearCall, LogitsCall, Stats
from xent.core.teachers import DivergenceCall

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["BACKEND", "MetalBackend"]


class MetalBackend:
    """Backend "metal": MLX arrays on Apple GPUs."""

    name = "metal"
    framework = "mlx"
    native_to: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Return what was found when this machine was first looked at."""
        from xent.backends.metal import machine

        return machine.MISSING

    def info(self) -> BackendInfo:
        """Report the version of MLX, and the device."""
        from xent.backends.metal import machine

        return BackendInfo(
            self.name, self.framework, machine.MISSING is None, machine.MISSING, machine.VERSIONS, machine.DEVICES
        )

    def refuse(self, call: LogitsCall | LinearCall) -> str | None:
        """Refuse float64, which Metal does not have, MLX's CPU device, and a GPU that the kernels do not run on."""
        from xent.backends.metal import machine
        from xent.backends.mlx.devices import device_type

        array = call.logits if isinstance(call, LogitsCall) else call.input
        if dtype_name(array) == "float64":
            return "Metal has no float64, which backend 'mlx' serves on the CPU"
        if device_type() not in machine.DEVICES:
            return "MLX computes on the CPU at the moment, which backend 'mlx' serves; or mx.set_default_device(mx.gpu)"
        from xent.backends.metal import rows

        problem = rows.problem(array.dtype)
        return None if problem is None else f"its kernels do not run on this GPU, which backend 'mlx' serves: {problem}"

    def run(self, call: LogitsCall | LinearCall) -> "tuple[mx.array, Stats]":
        """Run the call in the MLX driver with these row kernels."""
        from xent.backends.metal import rows  # noqa: F401  registers the row kernel
        from xent.backends.mlx import driver

        return driver.run(call, kernel=self.name)

    def refuse_divergence(self, call: DivergenceCall) -> str | None:
        """Refuse float64 and MLX's CPU device. Divergences have no kernels: MLX's own operations serve them."""
        from xent.backends.metal import machine
        from xent.backends.mlx.devices import device_type

        if dtype_name(call.array) == "float64":
            return "Metal has no float64, which backend 'mlx' serves on the CPU"
        if device_type() not in machine.DEVICES:
            return "MLX computes on the CPU at the moment, which backend 'mlx' serves; or mx.set_default_device(mx.gpu)"
        return None

    def run_divergence(self, call: DivergenceCall) -> "tuple[mx.array, Stats]":
        """Run a divergence in the MLX driver, with MLX's own operations on the GPU."""
        from xent.backends.mlx.divergence import entry

        return entry.run(call)

    def harness(self, device: str | None = None) -> "Harness[mx.array]":
        """Return the harness of the gradient checks, without float64."""
        from xent.backends.metal.harness import MetalHarness

        return MetalHarness(device)


BACKEND = MetalBackend()
