"""The contract of a backend, and where its parts are: read this to add a device.

A `Backend` serves calls of one framework; `xent.backends.TABLE` has one line for each. It receives a
`xent.core.call.Call`, the one description of a call. The framework's driver contains what is the same on all devices:
autograd, parts of rows, matrix products. The backend contains the computation of a row, from its logits to its loss, in
four steps:

- **fold**: accumulate sums over one block of a row's logits: largest x, sum of exponentials, the target's x, and those
  that options need.
- **merge**: combine the sums of two blocks, tiles, launches or ranks.
- **finish**: compute a row's loss, statistics and gradient coefficients from its sums. Only this step handles options.
- **gradient**: write the gradient of a block from the row's sums and coefficients.

Each language implements these steps once, and names sums as `xent.backends.torch.contract.columns` does. If rows are
always whole there is no merge:

- NumPy: `xent.backends.reference`, whole rows, written like the formulas. All other backends are tested against it.
- PyTorch: `xent.backends.torch.portable`, in PyTorch's own operations: fold and gradient in
  `xent.backends.torch.portable.rows`, merge and finish in `xent.backends.torch.portable.steps`.
- Triton: device functions in `xent.backends.triton.kernels.fold`, `xent.backends.triton.kernels.sums` (merge),
  `xent.backends.triton.kernels.algebra` (finish) and `xent.backends.triton.kernels.rows_kernel` (gradient, and all
  steps of whole rows).
- MLX: whole rows; fold in `xent.backends.mlx.block.Block.fold`; finish in `xent.backends.mlx.kernels.finish` and
  `xent.backends.mlx.kernels.coefficients`; gradient in `xent.backends.mlx.block.Block.gradient`.
- Metal, in `src/backends/metal/`: fold in `loss.metal`, merge in `sums.metal`, finish in `loss.metal`, gradient in
  `gradient.metal`.

A device gives its steps to its framework's driver.

- PyTorch: `xent.backends.torch.contract.STEPS` has, under the name of the backend, the class that implements
  `xent.backends.torch.contract.Steps`. For a device whose kernels take blocks of logits, subclass
  `xent.backends.torch.portable.steps.PortableSteps`, as `xent.backends.metal.torch_steps.MetalSteps` does.
- MLX: `xent.backends.mlx.MlxBackend.kernel` returns a module with two functions of a block, described in
  `xent.backends.mlx.kernels`.
"""

from typing import Protocol

from xent.core.call import Call
from xent.core.spec import Array, BackendInfo, Stats

__all__ = ["Backend"]


class Backend(Protocol):
    """Serves calls of one framework, on all or some of its devices. Each backend's module has one, named `BACKEND`.

    One that "auto" may skip although it is available also has a method `unproven`. It returns why, and what would
    change that, or None.
    """

    name: str
    framework: str
    """The framework of its arrays: "torch", "mlx" or "numpy"."""
    native_to: tuple[str, ...]
    """Device types for which "auto" warns if it does not select this backend."""

    @property
    def missing(self) -> str | None:
        """Why this machine cannot run the backend, or None. Every call reads it, so it should be a class attribute."""

    def info(self) -> BackendInfo:
        """Return the line of `xent.backends()`, with versions and devices."""

    def refuse(self, call: Call) -> str | None:
        """Return why this call cannot be served, and what could serve it; None if it can be served."""

    def run(self, call: Call) -> tuple[Array, Stats]:
        """Return the loss, an array of the call's framework, and the statistics that `call.options.stats` names."""

    def top_k(self, call: Call) -> tuple[Array, Array]:
        """Return ids and log-probabilities (..., K) of a call whose target is a `xent.core.call.Largest`."""
