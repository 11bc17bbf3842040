"""Which backend of xent the demo uses, and why not the others."""

import os

import torch
from rich.console import Console
from rich.table import Table

import xent

__all__ = ["picked_backend", "print_backends"]


def picked_backend(device: torch.device) -> str:
    """Return the name of the backend that "auto" selects on this device: the first that can serve a small call.

    Raises `xent.BackendError` if XENT_BACKEND names one that cannot serve the demo.
    """
    hidden, weight = torch.ones(2, 8, device=device), torch.ones(4, 8, device=device)
    target = torch.zeros(2, dtype=torch.int64, device=device)
    wanted = os.environ.get("XENT_BACKEND")
    for name in [wanted] if wanted else [info.name for info in xent.backends()]:
        try:
            xent.linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), target, backend=name)
        except xent.BackendError:
            if name == wanted:
                raise
        else:
            return name
    raise xent.BackendError(f"no backend serves torch tensors on {device}")


def print_backends(picked: str, console: Console) -> None:
    """Print one line per backend: whether it is used, or why not."""
    table = Table(box=None, show_header=False)
    for info in xent.backends():
        versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
        state = f"for {info.framework}; {versions}" if info.available else f"not available: {info.reason}"
        table.add_row("->" if info.name == picked else "", info.name, state)
    console.print(table)
