"""torch.func transforms inside of torch.compile: put the eager Function into the compiled graph without tracing it.

Dynamo reads `requires_grad` of a transform's argument as False, and what it traces can be differentiated twice without
an error. With `allow_in_graph` the Function runs as in eager mode, at each call or while AOT Autograd traces. It is
also disabled for Dynamo, which would otherwise trace into it after a graph break.

Imported by the first call that needs it, because `allow_in_graph` imports all of Dynamo.
"""

from typing import Any

import torch

from xent.backends.torch import operations

__all__ = ["decided"]

decided: Any = torch.compiler.allow_in_graph(torch.compiler.disable(operations.decided))
