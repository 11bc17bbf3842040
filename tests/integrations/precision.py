"""The precision of matrix products of float32, which libraries lower to TF32 for good."""

import torch

__all__ = ["multiply_in_float32"]


def multiply_in_float32() -> None:
    """Take back what the Trainer sets where it compiles, and what accelerate sets with the older switch."""
    torch.backends.cuda.matmul.allow_tf32 = False
    if hasattr(torch.backends, "fp32_precision"):  # PyTorch 2.9, which raises once the two switches contradict
        torch.backends.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = "none"
