"""Backend "metal" for PyTorch tensors on Apple GPUs: the same kernels as for MLX arrays, in the PyTorch driver."""

from typing import TYPE_CHECKING

from xent.backends.protocol import Harness, Unproven
from xent.backends.torch import TorchBackend
from xent.core.arrays import dtype_name
from xent.core.call import Call, Given
from xent.core.spec import BackendInfo

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BACKEND", "MetalTorchBackend"]


class MetalTorchBackend(TorchBackend):
    """Backend "metal": tensors on device "mps"."""

    name = "metal"
    native_to: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Return why Metal cannot be used, as found at the first call, or None."""
        from xent.backends.metal.torch_machine import MISSING

        return MISSING

    def info(self) -> BackendInfo:
        """Report the version of PyTorch, and the device."""
        from xent.backends.metal.torch_machine import DEVICES, MISSING, VERSIONS

        doubt = self.unproven() if MISSING is None else None
        notes = () if doubt is None else (f'"auto" does not take it: {doubt}',)
        return BackendInfo(self.name, self.framework, MISSING is None, MISSING, VERSIONS, DEVICES, notes)

    def unproven(self) -> str | None:
        """Return why "auto" skips this backend: the check has not passed on this machine. Otherwise None."""
        from xent.backends.metal import proof

        return None if proof.PROVEN else "its kernels are not proved here: run python -m xent check metal --full"

    def refuse(self, call: Call) -> str | None:
        """Refuse shards, other devices, and float64, which Metal does not have."""
        from xent.backends.metal.torch_machine import DEVICES

        if call.shards is not None:
            return "it has no kernels for a vocabulary in shards, which backend 'torch' serves"
        source = call.source
        arrays = [source.logits] if isinstance(source, Given) else [source.input, source.weight]
        device = arrays[0].device.type
        if device not in (*DEVICES, "meta"):
            return f"it serves {' and '.join(DEVICES)} tensors and got a {device} tensor, which backend 'torch' serves"
        if "float64" in map(dtype_name, arrays):
            return "Metal has no float64, which backend 'torch' serves on the CPU"
        return None

    def register(self) -> None:
        """Register the kernels with the loop. PyTorch's own operations compute divergences."""
        from xent.backends.metal import torch_steps  # noqa: F401

    def harness(self, device: str | None = None) -> "Harness[Tensor]":
        """Return the harness of the gradient checks, without float64."""
        from xent.backends.metal.torch_harness import MetalTorchHarness

        return MetalTorchHarness(device)


BACKEND: Unproven = MetalTorchBackend()
