"""xent where people train: modules of each framework, and libraries built on them."""

__all__: list[str] = []
