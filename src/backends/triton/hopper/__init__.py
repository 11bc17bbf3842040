"""Kernels for Hopper GPUs only, in Gluon. `door` decides whether they run. Everything works without them."""

__all__: list[str] = []
