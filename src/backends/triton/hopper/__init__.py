"""Kernels for Hopper GPUs alone, in Gluon. `door` says whether they run; everything works without them."""

__all__: list[str] = []
