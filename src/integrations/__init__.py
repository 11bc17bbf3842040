"""xent in the APIs of others: modules of PyTorch and MLX, transformers, TRL, axolotl, verl, Megatron, mlx-lm."""

__all__: list[str] = []
