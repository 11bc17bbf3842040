"""Import all modules of the PyTorch backends, once for all forked processes; calls would import them one by one."""

import importlib
import pkgutil

import torch._dynamo
import torch._functorch.aot_autograd
import torch.fx.experimental.symbolic_shapes  # noqa: F401

import xent.backends.torch

__all__ = []

_package = xent.backends.torch  # type: ignore[attr-defined]
for _found in pkgutil.walk_packages(_package.__path__, f"{_package.__name__}."):
    importlib.import_module(_found.name)
