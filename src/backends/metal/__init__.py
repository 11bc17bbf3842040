"""Backend "metal": row kernels for Apple GPUs, which the drivers of MLX and PyTorch call instead of their plain ones.

The kernels are Metal sources. A threadgroup computes one row. `forward.metal` and `backward.metal` are the bodies of
the two kernels. They use `loss.metal` and `gradient.metal`, and these use `call.metal` (template arguments and options
of a launch), `sums.metal` (the sums over a row), `columns.metal` (which thread reads which 16 bytes) and `maths.metal`.
`threads` chooses the number of threads per row, and `sources` assembles the source text. There are two launchers:

- MLX generates the signatures; `contiguous.metal` has the offsets of rows. `machine` finds out whether this machine has
  Metal, `rows` launches the kernels and registers them with the driver, and `limits` tries each kernel before it is
  used in a graph.
- For PyTorch, `signature.metal` is the signature of both kernels. `torch_machine`, `torch_steps` and `tensors` do the
  same; `torch_backend` is the backend, and `proof` stores that the check has passed.

With x, e, w, a as in `xent.cross_entropy`, the row's gradient factor r, and W = sum_c w_c::

    log p = x - max x - log sum_c exp(x_c - max x)
    l     = a [ (1-e) w_y (-log p_y) + (e/V) sum_c w_c (-log p_c) + zeta lse^2 ]
    dl/dz = r [ ((1-e) w_y + (e/V) W + 2 zeta lse) p - (1-e) w_y [c==y] - (e/V) w_c ] dx/dz

For class probabilities q, the share of class c is w_c ((1-e) q_c + e/V), and the sum of shares replaces the first two
terms in the bracket. A share of 0 contributes 0 even if log p is -inf. With reduction "none" the backward kernel adds
u p + n (p - [c==y]) - v p (log p + H) to dl/dx, for upstream gradients u of lse, n of nll and v of the entropy H. With
a temperature per row, scale and softcap differ by row.

Rows with a support (the classes that a sampler allowed) have no kernel. The frameworks' own operations compute them
(`xent.backends.mlx.supported`, `xent.backends.torch.portable`) from gathered logits.

A loss without gradient reads the logits once. A loss with gradient reads them once and writes the gradient once, if a
row fits into the registers of the threadgroup, 64 KiB: 32768 classes of 16 bits, 16384 of float32. The rest of a longer
row is read twice, its last part first, because that may still be in the GPU's last-level cache.
"""

from typing import TYPE_CHECKING

from xent.backends.mlx import MlxBackend
from xent.backends.protocol import Harness
from xent.core.arrays import dtype_name
from xent.core.call import Call, Dense, TopK, array_of
from xent.core.spec import BackendInfo

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["BACKEND", "MetalBackend"]


class MetalBackend(MlxBackend):
    """Backend "metal": MLX arrays on Apple GPUs."""

    name = "metal"

    def missing(self) -> str | None:
        """Return why Metal cannot be used, as found at the first call, or None."""
        from xent.backends.metal import machine

        return machine.MISSING

    def info(self) -> BackendInfo:
        """Report the version of MLX, and the device."""
        from xent.backends.metal import machine

        return BackendInfo(
            self.name, self.framework, machine.MISSING is None, machine.MISSING, machine.VERSIONS, machine.DEVICES
        )

    def refuse(self, call: Call) -> str | None:
        """Refuse float64, which Metal does not have, MLX's CPU device, and a GPU that the kernels do not run on."""
        from xent.backends.metal import machine, rows
        from xent.backends.mlx.devices import device_type

        dtype = array_of(call).dtype
        if dtype_name(array_of(call)) == "float64":
            return "Metal has no float64, which backend 'mlx' serves on the CPU"
        if device_type() not in machine.DEVICES:
            return "MLX computes on the CPU at the moment, which backend 'mlx' serves; or mx.set_default_device(mx.gpu)"
        problem = None if isinstance(call.target, Dense | TopK) else rows.problem(dtype)
        return None if problem is None else f"its kernels do not run on this GPU, which backend 'mlx' serves: {problem}"

    def register(self) -> None:
        """Register the row kernels with the MLX driver. Divergences have none; MLX's own operations compute them."""
        from xent.backends.metal import rows  # noqa: F401

    def harness(self, device: str | None = None) -> "Harness[mx.array]":
        """Return the harness of the gradient checks, without float64."""
        from xent.backends.metal.harness import MetalHarness

        return MetalHarness(device)


BACKEND = MetalBackend()
