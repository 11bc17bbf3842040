"""Reset the precision of float32 matrix products, which libraries set to TF32 for the whole process."""

import torch

__all__ = ["multiply_in_float32"]


def multiply_in_float32() -> None:
    """Undo the Trainer's setting when it compiles, and accelerate's, which uses the older switch."""
    torch.backends.cuda.matmul.allow_tf32 = False
    if hasattr(torch.backends, "fp32_precision"):  # PyTorch 2.9 raises if the two switches contradict
        torch.backends.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = "none"
