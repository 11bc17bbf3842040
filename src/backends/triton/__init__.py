"""Backend "triton": kernels for GPUs, called by the loop of the PyTorch driver.

- `steps` implements `xent.backends.torch.contract.Steps`: whole rows in one launch, or fold, finish and gradient one by
  one. `targets` launches the kernels of supports and divergences.
- `launches` has the argument groups of all kernels and launches these, `inputs` fills them, `geometry` chooses sizes.
- `kernels` has the kernels, and the device functions that they share.
- `compilations` logs the kernels that are compiled.
- `largest` launches the kernels of the most probable classes.
- `hopper` contains two matrix products for Hopper GPUs.
"""

from xent.backends.torch import TorchBackend
from xent.backends.triton import machine
from xent.core.call import Call, array_of, dtype_name
from xent.core.spec import BackendInfo

__all__ = ["BACKEND", "TritonBackend"]


class TritonBackend(TorchBackend):
    """Backend "triton": CUDA tensors, and CPU tensors if Triton interprets its kernels (TRITON_INTERPRET=1)."""

    name = "triton"
    native_to: tuple[str, ...] = ("cuda",)
    missing = machine.MISSING

    def info(self) -> BackendInfo:
        """Report the versions of Triton and PyTorch, the device, and whether Hopper's kernels run."""
        notes: tuple[str, ...] = ()
        if self.missing is None:
            import torch

            from xent.backends.triton import steps  # noqa: F401 (the probe is a call)
            from xent.backends.triton.hopper.products import off

            reason = off(torch.device("cuda"))
            notes = ("Hopper kernels: " + ("on" if reason is None else f"off, {reason}"),)
            doubt = self.unproven()
            notes += () if doubt is None else (f'"auto" does not take it: {doubt}',)
        is_there, devices = self.missing is None, machine.DEVICES
        return BackendInfo(self.name, self.framework, is_there, self.missing, machine.VERSIONS, devices, notes)

    def unproven(self) -> str | None:
        """Return why "auto" skips this backend: it never ran on a GPU of this kind, and the check has not passed."""
        if machine.UNTRIED is None or machine.PROOF.passed:
            return None
        return (
            f"its kernels are compiled for {machine.UNTRIED}, but never ran on a GPU of its kind: run python -m xent "
            "check triton --full, which proves them here"
        )

    def refuse(self, call: Call) -> str | None:
        """Refuse tensors on other devices, and float64, which these kernels would round to float32."""
        array, devices = array_of(call), machine.DEVICES
        device = array.device.type
        if device not in (*devices, "meta"):
            return f"it serves {' and '.join(devices)} tensors and got a {device} tensor, which backend 'torch' serves"
        if dtype_name(array) == "float64":
            return "its kernels accumulate in float32 and would round float64, which backend 'torch' serves"
        return None

    def load(self) -> None:
        """Import the modules that register the steps of this backend."""
        from xent.backends.triton import largest, steps  # noqa: F401


BACKEND = TritonBackend()
