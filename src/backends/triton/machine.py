"""Whether this machine can run Triton, determined once, when the first call that could use it arrives."""

import re
from functools import cache
from typing import Any

from xent.backends.proof import Proof

__all__ = ["DEVICES", "MISSING", "PROOF", "UNTRIED", "VERSIONS", "find", "multiprocessors"]

_OLDEST = (3, 4)
_OLDEST_CAPABILITY = (7, 5)
_TRIED_CAPABILITY = (8, 0)


def find() -> tuple[str | None, dict[str, str], tuple[str, ...]]:
    """Return (reason why Triton cannot be used or None, versions of packages, supported device types)."""
    versions: dict[str, str] = {}
    try:
        import torch

        versions["torch"] = str(torch.__version__)
        import triton
    except ImportError as error:
        return f"{error}; pip install triton for an NVIDIA GPU, or use backend 'torch'", versions, ()
    versions["triton"] = str(triton.__version__)
    if tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        return f"it needs Triton {oldest} or later and found {triton.__version__}", versions, ()
    if _is_interpreting():
        return None, versions, ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    if not torch.cuda.is_available():
        built = "finds no GPU or driver" if torch.version.cuda or torch.version.hip else "is built without CUDA"
        return f"PyTorch {torch.__version__} {built}", versions, ()
    worst = min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    if worst < _OLDEST_CAPABILITY and not torch.version.hip:
        needed, present = (".".join(map(str, pair)) for pair in (_OLDEST_CAPABILITY, worst))
        return f"it needs GPUs of compute capability {needed} or later and found one of {present}", versions, ()
    return None, versions, ("cuda",)


def _untried() -> str | None:
    """Return the name of a GPU for which the kernels have been compiled, but on whose kind they never ran; or None."""
    import torch

    for index in range(torch.cuda.device_count()):
        if torch.version.hip or torch.cuda.get_device_capability(index) < _TRIED_CAPABILITY:
            return torch.cuda.get_device_name(index)
    return None


def _is_interpreting() -> bool:
    """Return whether Triton runs kernels in its interpreter, on the CPU, as TRITON_INTERPRET=1 asks."""
    import triton

    @triton.jit
    def kernel() -> None:
        pass

    return not isinstance(kernel, triton.JITFunction)


MISSING, VERSIONS, DEVICES = find()
UNTRIED = _untried() if MISSING is None and DEVICES == ("cuda",) else None
PROOF = Proof("triton", f"{VERSIONS}, {UNTRIED}")


@cache
def multiprocessors(device: Any) -> int:
    """Return the number of multiprocessors of a CUDA device, or 1 for other devices."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
