"""What a backend is, and what a row kernel is: all that someone who adds a device has to read.

A backend serves whole calls. Most of the work in one is the same for every device of a framework: cutting rows into
chunks, matrix products, autograd. That is the framework's driver, written once. What differs from device to device is
the row kernel, which sees one block of logits at a time and turns it into losses and, in place if asked, into the
gradient of those logits. `RowKernel` is that of the torch driver; arrays of MLX are values, and for them the same
contract is written as functions, in `xent.backends.mlx.kernels`.
"""

from typing import Any, Protocol

from xent.core.spec import BackendInfo, LinearCall, LogitsCall, Stats

__all__ = ["Backend", "Harness", "RowKernel", "RowPass"]


class Backend(Protocol):
    """Serves calls of one framework, perhaps on some devices only. Its module holds one, named `BACKEND`."""

    name: str
    framework: str
    native_to: tuple[str, ...]
    """Device types on which passing this backend over is worth a warning."""

    def missing(self) -> str | None:
        """Return why this machine cannot run the backend, None if it can. Asked at every call: it must cost nothing."""

    def info(self) -> BackendInfo:
        """Say the same for people, with versions and devices."""

    def refuse(self, call: LogitsCall | LinearCall) -> str | None:
        """Return why this call cannot be served, with what would serve it; None if it can."""

    def run(self, call: LogitsCall | LinearCall) -> tuple[Any, Stats]:
        """Return the loss and the statistics that `call.loss.stats` names."""

    def harness(self, device: str | None = None) -> "Harness":
        """Return what the gradient checks need to drive this backend, on `device` or the best device there is."""


class RowPass(Protocol):
    """One pass over the rows of one call: holds per-row facts and results, is handed blocks of logits in any order."""

    def forward(self, logits: Any, start: int, grad: Any | None, target_logits: Any | None = None) -> None:
        """Take rows [start, start + R): record their losses, statistics and lse; write their gradient where asked.

        `logits` is an (R, V) block whose last axis is contiguous. `grad` is None, or where the gradient of the
        (reduced) loss goes: an (R, V) block of the logits' dtype, which may be `logits` itself. `target_logits` (R,),
        in the accumulation dtype, takes the place of the targets' raw logits, which were rounded to a low precision.
        """

    def backward(self, logits: Any, start: int, grad: Any, target_logits: Any | None = None) -> None:
        """Write the gradient of rows [start, start + R) from the recorded lse; `grad` may be `logits` itself."""


class RowKernel(Protocol):
    """Makes row passes. The torch driver finds it by the name under which it was registered."""

    def __call__(self, facts: Any, results: Any) -> RowPass:
        """Start a pass over the rows that `facts` describes, with `results` to fill."""


class Harness(Protocol):
    """Lets the gradient checks (`python -m xent check`, tests/) drive any framework with NumPy arrays."""

    device: str
    dtypes: tuple[str, ...]

    def array(self, values: Any, dtype: str | None = None) -> Any:
        """Return a NumPy array as the framework's array on the device, as `dtype` if given."""

    def numpy(self, array: Any) -> Any:
        """Return a framework's array as a NumPy array, floats as float64."""

    def gradients(self, function: Any, inputs: tuple[Any, ...], upstream: Any | None) -> tuple[Any, list[Any]]:
        """Return `function(*inputs)` and its gradients with respect to `inputs`, for `upstream` (ones where None)."""

    def linear(self, input: Any, weight: Any, bias: Any | None) -> Any:
        """Return the logits that the unfused computation would hold."""

    def unfused_loss(self, logits: Any, target: Any, **options: Any) -> Any:
        """Compute the loss from (..., V) logits with the framework's own differentiable operations.

        Its rounding error is the yardstick; nothing of xent takes part in it.
        """
