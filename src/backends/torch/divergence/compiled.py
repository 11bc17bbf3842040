"""torch.func transforms of a divergence inside of torch.compile: the eager Function in the graph, as in `compiled`.

Imported by the first call that needs it, because `allow_in_graph` imports all of Dynamo.
"""

from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.autograd import asks_for_gradient
from xent.backends.torch.divergence.autograd import DivergenceFunction
from xent.backends.torch.transforms import NO_TEACHER_GRADIENT, refuse_gradients, refuse_transforms

__all__ = ["divergence"]

_NAMES = ("student", "weight", "bias", "teacher", "teacher_weight", "teacher_bias", "sample_weight", "normalizer")


def _divergence(*args: Any) -> Any:
    """Apply `DivergenceFunction`, with `needs` read from the arguments."""
    named = dict(zip(_NAMES, args, strict=False))
    constant = {"teacher": args[3], "teacher.log_probs": args[4], "sample_weight": args[6], "normalizer": args[7]}
    refuse_gradients(
        {name: value for name, value in constant.items() if isinstance(value, Tensor)}, NO_TEACHER_GRADIENT
    )
    refuse_transforms({name: value for name, value in named.items() if isinstance(value, Tensor)})
    return DivergenceFunction.apply(*args[:9], asks_for_gradient(*args[:3]), *args[10:])


divergence: Any = torch.compiler.allow_in_graph(torch.compiler.disable(_divergence))
