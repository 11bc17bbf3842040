"""The kernels in Metal, as the MLX driver takes them."""

from xent.backends.metal.rows import backward, forward
from xent.backends.mlx.kernels import Kernels

__all__ = ["KERNELS"]

KERNELS = Kernels(forward, backward)
