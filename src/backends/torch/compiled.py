"""torch.func transforms inside of torch.compile: the eager Functions, as they are, in the compiled graph.

Dynamo reads `requires_grad` of a transform's own argument as False, so that it would record a constant; before PyTorch
2.11 it cannot trace a torch.autograd.Function there; and what it traces differentiates twice without an error. Allowed
in the graph whole, the Functions run as in eager mode: in every call with backend "eager", and while AOT Autograd
traces with others. They are disabled too, since Dynamo would trace into them where an error has broken the graph.

Imported by the first call that needs it: `allow_in_graph` imports all of Dynamo.
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
