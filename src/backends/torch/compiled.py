"""torch.func transforms inside of torch.compile: put the eager Functions into the compiled graph without tracing them.

Tracing them fails in three ways. Dynamo reads `requires_grad` of a transform's argument as False, so that it would
record a constant. Before PyTorch 2.11 it cannot trace a torch.autograd.Function there. And what it traces can be
differentiated twice without an error. With `allow_in_graph` the Functions run as in eager mode: at each call with
backend "eager", and while AOT Autograd traces with other backends. They are also disabled for Dynamo, which would
otherwise trace into them after a graph break.

Imported by the first call that needs it, because `allow_in_graph` imports all of Dynamo.
"""

from collections.abc import Callable
from typing import Any

import torch

from xent.backends.torch import differentiated

__all__ = ["cross_entropy", "linear_cross_entropy"]


def _in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    allowed: Callable[..., Any] = torch.compiler.allow_in_graph(torch.compiler.disable(function))
    return allowed


cross_entropy = _in_graph(differentiated.cross_entropy)
linear_cross_entropy = _in_graph(differentiated.linear_cross_entropy)
