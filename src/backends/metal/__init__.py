"""Backend "metal": row kernels for Apple GPUs, which the drivers of MLX and PyTorch call instead of their plain ones.

The kernel is Metal source. A threadgroup computes one row, forward or backward. `rows.metal` is its body. It uses
`loss.metal` (template arguments, options, the loss of a row) and `gradient.metal`, and these use `sums.metal` (the sums
over a row) and `maths.metal` (also: which thread reads which 16 bytes). `sources` assembles the source text and chooses
template arguments and the number of threads per row. There are two launchers:

- For MLX `rows` tries each kernel before it is used in a graph, and launches it.
- For PyTorch `torch_steps` launches it. `torch_machine` has the backend, and whether PyTorch can use Metal here.

With x, e, w, a as in `xent.cross_entropy`, the row's gradient factor r, and W = sum_c w_c::

    log p = x - max x - log sum_c exp(x_c - max x)
    l     = a [ (1-e) w_y (-log p_y) + (e/V) sum_c w_c (-log p_c) + zeta lse^2 ]
    dl/dz = r [ ((1-e) w_y + (e/V) W + 2 zeta lse) p - (1-e) w_y [c==y] - (e/V) w_c ] dx/dz

For class probabilities q, the share of class c is w_c ((1-e) q_c + e/V), and the sum of shares replaces the first two
terms in the bracket. A share of 0 contributes 0 even if log p is -inf. With reduction "none" the backward pass adds
u p + n (p - [c==y]) - v p (log p + H) to dl/dx, for upstream gradients u of lse, n of nll and v of the entropy H. With
a temperature per row, scale and softcap differ by row.

Rows with a support (the classes that a sampler allowed) have no kernel. The frameworks' own operations compute them.

A loss without gradient reads the logits once. A loss with gradient reads them once and writes the gradient once, if a
row fits into the registers of the threadgroup, 64 KiB: 32768 classes of 16 bits, 16384 of float32. The rest of a longer
row is read twice, its last part first, because that may still be in the GPU's last-level cache.
"""

import platform
from typing import TYPE_CHECKING

from xent.backends.mlx import MlxBackend
from xent.core.call import Call, array_of, dtype_name

if TYPE_CHECKING:
    from xent.backends.mlx.kernels import RowKernel

__all__ = ["BACKEND", "MetalBackend"]


class MetalBackend(MlxBackend):
    """Backend "metal": MLX arrays on Apple GPUs."""

    name = "metal"

    @property
    def missing(self) -> str | None:
        """Why Metal cannot be used, or None."""
        if (reason := super().missing) is not None:
            return reason
        import mlx.core as mx

        if mx.metal.is_available():
            return None
        machine = f"{platform.system()} on {platform.machine()}"
        return f"its kernels are for Apple GPUs, and MLX finds no Metal here ({machine}); use backend 'mlx'"

    def devices(self) -> tuple[str, ...]:
        """Return the device type of Apple GPUs."""
        return ("gpu",)

    def refuse(self, call: Call) -> str | None:
        """Refuse float64, which Metal does not have, and MLX's CPU device."""
        from xent.backends.mlx.devices import device_type

        if dtype_name(array_of(call)) == "float64":
            return "Metal has no float64, which backend 'mlx' serves on the CPU"
        if device_type() not in self.devices():
            return "MLX computes on the CPU at the moment, which backend 'mlx' serves; or mx.set_default_device(mx.gpu)"
        return None

    def kernel(self) -> "RowKernel":
        """Return the row kernel. Divergences and supports have none; MLX's own operations compute them."""
        from xent.backends.metal import rows

        return rows


BACKEND = MetalBackend()
