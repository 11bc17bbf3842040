"""Backend "metal" for tensors of PyTorch, and whether PyTorch can use Metal here, found when this is imported."""

import os
import platform

from xent.backends.proof import Proof
from xent.backends.torch import TorchBackend
from xent.core.call import Call, array_of, dtype_name
from xent.core.spec import BackendInfo

__all__ = ["BACKEND", "DEVICES", "MISSING", "PROOF", "VERSIONS", "MetalTorchBackend", "find"]


def find() -> tuple[str | None, dict[str, str], tuple[str, ...]]:
    """Return (why Metal cannot be used or None, versions, device types)."""
    try:
        import torch
    except ImportError as error:
        return f"PyTorch cannot be imported: {error}", {}, ()
    versions = {"torch": str(torch.__version__)}
    if not torch.backends.mps.is_available():
        machine = f"{platform.system()} on {platform.machine()}"
        reason = f"its kernels are for Apple GPUs, and PyTorch finds none here ({machine}); use backend 'torch'"
    elif os.environ.get("PYTORCH_MPS_FAST_MATH", "0") != "0":
        reason = "PYTORCH_MPS_FAST_MATH=1 compiles kernels as if there were no infinities: unset it"
    else:
        return None, versions, ("mps",)
    return reason, versions, ()


MISSING, VERSIONS, DEVICES = find()
PROOF = Proof("metal", f"torch {VERSIONS.get('torch')}")
"""For PyTorch's tensors "auto" uses the kernels only where they are proved."""


class MetalTorchBackend(TorchBackend):
    """Backend "metal": tensors on device "mps"."""

    name = "metal"
    native_to: tuple[str, ...] = ()
    missing = MISSING

    def info(self) -> BackendInfo:
        """Report the version of PyTorch, and the device."""
        is_there = self.missing is None
        doubt = self.unproven() if is_there else None
        notes = () if doubt is None else (f'"auto" does not take it: {doubt}',)
        return BackendInfo(self.name, self.framework, is_there, self.missing, VERSIONS, DEVICES, notes)

    def unproven(self) -> str | None:
        """Return why "auto" skips this backend: the check has not passed on this machine. Otherwise None."""
        return None if PROOF.passed else "its kernels are not proved here: run python -m xent check metal --full"

    def refuse(self, call: Call) -> str | None:
        """Refuse shards, other devices, and float64, which Metal does not have."""
        if call.shards is not None:
            return "it has no kernels for a vocabulary in shards, which backend 'torch' serves"
        array = array_of(call)
        device = array.device.type
        if device not in (*DEVICES, "meta"):
            return f"it serves {' and '.join(DEVICES)} tensors and got a {device} tensor, which backend 'torch' serves"
        if dtype_name(array) == "float64":
            return "Metal has no float64, which backend 'torch' serves on the CPU"
        return None

    def load(self) -> None:
        """Import the module that registers the steps. PyTorch's own operations compute divergences."""
        from xent.backends.metal import torch_steps  # noqa: F401


BACKEND = MetalTorchBackend()
