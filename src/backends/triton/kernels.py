"""The kernels in Triton, as the PyTorch driver takes them."""

from xent.backends.torch.kernels import Kernels
from xent.backends.triton.exponentials import start
from xent.backends.triton.facts import gather_facts
from xent.backends.triton.order import computed_first
from xent.backends.triton.rows import TritonPass
from xent.backends.triton.steps import reduced, scale_, target_logits
from xent.backends.triton.tiles import TilePass

__all__ = ["KERNELS"]

KERNELS = Kernels(TritonPass, gather_facts, computed_first, reduced, target_logits, scale_, TilePass, start)
