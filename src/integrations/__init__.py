"""xent in the APIs of other libraries: modules for PyTorch and MLX, transformers, TRL, verl, Megatron and mlx-lm."""

__all__: list[str] = []
