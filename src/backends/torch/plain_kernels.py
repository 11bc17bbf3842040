"""The kernels made of PyTorch's own operations, for every device."""

from xent.backends.torch.facts import gather_facts
from xent.backends.torch.kernels import Kernels
from xent.backends.torch.plain import PlainPass
from xent.backends.torch.steps import computed_first, reduced, scale_, target_logits

__all__ = ["KERNELS"]

KERNELS = Kernels(PlainPass, gather_facts, computed_first, reduced, target_logits, scale_)
