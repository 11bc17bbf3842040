"""The harness of the gradient checks for PyTorch: conversion of arrays, gradients, and the unfused computation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xent.backends.torch.devices import devices
from xent.command.check.harness import Harness, Operand
from xent.core.spec import Array

__all__ = ["TorchHarness"]


class TorchHarness(Harness[Tensor]):
    """The harness for one device."""

    ops, seconds = torch, 0.03

    def __init__(self, device: str | None = None) -> None:
        self.device = device or devices()[0]
        # Metal has no float64.
        self.dtypes = ("float64", "float32", "bfloat16", "float16")[self.device.startswith("mps") :]
        self.kernels: tuple[str, ...] = ("PyTorch's own operations",)

    def array(self, array: Array, dtype: str | None = None) -> Tensor:
        """Return a NumPy array as a tensor on the device."""
        tensor = torch.from_numpy(np.array(array))
        return tensor.to(self.device, getattr(torch, dtype) if dtype else tensor.dtype)

    def numpy(self, array: Tensor) -> Array:
        """Return a tensor as a NumPy array, floats as float64."""
        tensor = array.detach().cpu()
        return (tensor.double() if tensor.is_floating_point() else tensor).numpy()

    def gradients(
        self, function: Callable[..., Any], inputs: tuple[Tensor, ...], upstream: Operand
    ) -> tuple[Operand, list[Tensor]]:
        """Return `function(*inputs)` and its gradients."""
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        results = function(*leaves)
        if not isinstance(results, tuple):
            return results.detach(), list(torch.autograd.grad(results, leaves, upstream))
        used = [(result, grad) for result, grad in zip(results, upstream, strict=True) if grad is not None]
        outputs, grads = zip(*used, strict=True)
        return tuple(result.detach() for result in results), list(torch.autograd.grad(outputs, leaves, grads))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of the unfused computation."""
        return F.linear(input, weight, bias)

    def cast(self, array: Operand, dtype: Any) -> Operand:
        """Return a tensor as another dtype."""
        return array.to(dtype or torch.promote_types(array.dtype, torch.float32))

    def is_float(self, array: Operand) -> bool:
        """Whether a tensor has a float dtype."""
        return bool(array.is_floating_point())

    def picked(self, array: Operand, ids: Operand) -> Operand:
        """Return the values at some ids."""
        return array.gather(-1, ids)

    def log_softmax(self, x: Operand) -> tuple[Operand, Operand]:
        """Return the normalizer and the logarithm of the softmax."""
        return torch.logsumexp(x, -1), torch.log_softmax(x, -1)

    def row_losses(self, x: Operand, target: Operand, weight: Operand, ignored: Operand, smoothing: float) -> Operand:
        """Return the cross entropy of rows."""
        if not self.is_float(target):
            target = target.masked_fill(ignored, -100)
        return F.cross_entropy(x, target, weight=weight, reduction="none", label_smoothing=smoothing)
