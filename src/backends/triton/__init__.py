"""Backend "triton": kernels for GPUs, called by the loop of the PyTorch driver.

- `steps` implements `xent.backends.torch.contract.Steps`: whole rows in one launch, or fold, finish and gradient one by
  one. `targets` launches the kernels of supports and divergences.
- `launches` has the argument groups of all kernels and launches these, `inputs` fills them, `geometry` chooses sizes.
- `kernels` has the kernels, and the device functions that they share.
- `hopper` contains two matrix products for Hopper GPUs.
"""

from typing import TYPE_CHECKING

from xent.backends.harness import Harness
from xent.backends.torch import TorchBackend
from xent.core.arrays import dtype_name
from xent.core.call import Call, array_of
from xent.core.spec import BackendInfo

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BACKEND", "TritonBackend"]


class TritonBackend(TorchBackend):
    """Backend "triton": CUDA tensors, and CPU tensors if Triton interprets its kernels (TRITON_INTERPRET=1)."""

    name = "triton"
    native_to: tuple[str, ...] = ("cuda",)

    def missing(self) -> str | None:
        """Return the reason why Triton cannot be used on this machine, or None. It is determined once."""
        from xent.backends.triton.machine import MISSING

        return MISSING

    def info(self) -> BackendInfo:
        """Report the versions of Triton and PyTorch, the device, and whether Hopper's kernels run."""
        from xent.backends.triton.machine import DEVICES, MISSING, VERSIONS

        notes: tuple[str, ...] = ()
        if MISSING is None:
            import torch

            from xent.backends.triton.hopper.products import off

            self.register()  # the probe is a call
            reason = off(torch.device("cuda"))
            notes = ("Hopper kernels: " + ("on" if reason is None else f"off, {reason}"),)
            doubt = self.unproven()
            notes += () if doubt is None else (f'"auto" does not take it: {doubt}',)
        return BackendInfo(self.name, self.framework, MISSING is None, MISSING, VERSIONS, DEVICES, notes)

    def unproven(self) -> str | None:
        """Return why "auto" skips this backend: it never ran on a GPU of this kind, and the check has not passed."""
        from xent.backends.triton.machine import PROOF, UNTRIED

        if UNTRIED is None or PROOF.passed:
            return None
        return (
            f"its kernels are compiled for {UNTRIED}, but never ran on a GPU of its kind: run python -m xent check "
            "triton --full, which proves them here"
        )

    def refuse(self, call: Call) -> str | None:
        """Refuse tensors on other devices, and float64, which these kernels would round to float32."""
        from xent.backends.triton.machine import DEVICES

        array = array_of(call)
        device = array.device.type
        if device not in (*DEVICES, "meta"):
            return f"it serves {' and '.join(DEVICES)} tensors and got a {device} tensor, which backend 'torch' serves"
        if dtype_name(array) == "float64":
            return "its kernels accumulate in float32 and would round float64, which backend 'torch' serves"
        return None

    def register(self) -> None:
        """Register the kernels with the loop."""
        from xent.backends.triton import steps  # noqa: F401

    def harness(self, device: str | None = None) -> "Harness[Tensor]":
        """Return the harness of the gradient checks, without float64."""
        from xent.backends.triton.harness import TritonHarness
        from xent.backends.triton.machine import PROOF, UNTRIED

        made = TritonHarness(device)
        if UNTRIED is not None:
            made.passed = PROOF.remember  # type: ignore[method-assign]
        return made


BACKEND = TritonBackend()
