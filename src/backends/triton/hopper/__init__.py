"""Kernels for Hopper GPUs only, in Gluon. `products` decides whether they run. Everything works without them."""

__all__: list[str] = []
