"""Replace a collective of torch.distributed wherever the package calls it, to count its calls or to plant a fault."""

import importlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import xent.backends.torch

__all__ = ["COLLECTIVES", "replace_collective"]

COLLECTIVES = {
    "gather": ("all_gather_into_tensor", "all_gather_single"),
    "scatter": ("reduce_scatter_tensor", "reduce_scatter_single"),
    "reduce": ("all_reduce",),
}
"""Kind -> its names in torch.distributed. PyTorch 2.13 has new names for two of them."""


def replace_collective(patch: pytest.MonkeyPatch, kind: str, make: Callable[[Any], Any]) -> None:
    """Replace each function of a kind by `make(function)`, also where a module has imported it."""
    package = xent.backends.torch  # type: ignore[attr-defined]
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(found.name)  # a module that is imported later would keep the replacement
    for name in COLLECTIVES[kind]:
        function = getattr(dist, name, None)
        if function is None:
            continue
        made = make(function)
        patch.setattr(dist, name, made)
        for module in [module for key, module in sys.modules.items() if key.startswith("xent.")]:
            for attribute, value in list(vars(module).items()):
                if value is function:
                    patch.setattr(module, attribute, made)
