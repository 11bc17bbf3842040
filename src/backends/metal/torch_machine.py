"""Whether PyTorch can use Metal on this machine, found once, at the first call that could use it."""

import os
import platform

from xent.backends.proof import Proof

__all__ = ["DEVICES", "MISSING", "PROOF", "VERSIONS", "find"]


def find() -> tuple[str | None, dict[str, str], tuple[str, ...]]:
    """Return (why Metal cannot be used or None, versions, device types)."""
    try:
        import torch
    except ImportError as error:
        return f"PyTorch cannot be imported: {error}", {}, ()
    versions = {"torch": str(torch.__version__)}
    if not torch.backends.mps.is_available():
        here = f"{platform.system()} on {platform.machine()}"
        reason = f"its kernels are for Apple GPUs, and PyTorch finds none here ({here}); use backend 'torch'"
    elif not hasattr(torch.mps, "compile_shader"):
        reason = f"it needs PyTorch 2.7 or later and found {torch.__version__}; use backend 'torch'"
    elif os.environ.get("PYTORCH_MPS_FAST_MATH", "0") != "0":
        reason = "PYTORCH_MPS_FAST_MATH=1 compiles kernels as if there were no infinities: unset it"
    else:
        return None, versions, ("mps",)
    return reason, versions, ()


MISSING, VERSIONS, DEVICES = find()
PROOF = Proof("metal", f"torch {VERSIONS.get('torch')}")
"""For PyTorch's tensors "auto" uses the kernels only where they are proved."""
