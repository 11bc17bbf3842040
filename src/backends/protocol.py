"""The contract of a backend, and where its parts are: read this to add a device.

A `Backend` serves whole calls of one framework; `xent.backends.TABLE` has one line for each. What is the same on every
device of a framework (autograd, chunks, matrix products) is in the framework's driver. What happens to a row between
its logits and its loss is the device's own. There, a row goes through four steps:

- **fold**: add up one block of a row's logits: largest x, sum of exponentials, the target's x, and what options need.
- **merge**: combine the sums of two blocks, tiles or launches.
- **finish**: turn a row's sums into loss, statistics and the coefficients of its gradient. Options end here.
- **gradient**: write a block's gradient from the row's sums and coefficients.

Each language has these steps once; where rows are always whole there is nothing to merge:

- NumPy: `xent.backends.reference`, whole rows, as the formulas are written. All other backends are tested against it.
- PyTorch: `xent.backends.torch.plain`, whole rows, in PyTorch's own operations.
- Triton: fold in `xent.backends.triton.row_fold.quick_sums` and `xent.backends.triton.tile_kernels.tile_kernel`;
  merge in `xent.backends.triton.maths.merge`; finish in `xent.backends.triton.row_algebra.losses` and
  `xent.backends.triton.row_algebra.coefficients`, after tiles `xent.backends.triton.tile_kernels.finish_kernel`;
  gradient in `xent.backends.triton.row_gradient.gradient_block`. Class probabilities and rows with a support have
  kernels of their own, `xent.backends.triton.probabilities_kernel` and `xent.backends.triton.support_kernel`.
- MLX: fold in `xent.backends.mlx.block.Block.fold`; merge in `xent.backends.mlx.finish.merge`; finish in
  `xent.backends.mlx.finish.finish` and `xent.backends.mlx.finish.coefficients`; gradient in
  `xent.backends.mlx.block.Block.gradient`.
- Metal, in `src/backends/metal/`: fold in `loss.metal`, merge in `sums.metal`, finish in `loss.metal`, gradient in
  `gradient.metal`.

A device registers its steps with its framework's driver, under the name of its backend. An unknown name is a KeyError.

- PyTorch: `xent.backends.torch.job.STARTERS` holds what starts a `xent.backends.torch.job.Job`, the rows of one call,
  and what scales a gradient. `xent.backends.triton.job.TritonJob` does all of it in kernels. For a device whose kernels
  take blocks of logits, subclass `xent.backends.torch.plain_job.PlainJob` and give it a
  `xent.backends.torch.plain_job.RowPass`, as `xent.backends.metal.torch_job.MetalJob` does.
- MLX: `xent.backends.mlx.kernels.KERNELS` holds a `xent.backends.mlx.kernels.Kernels`, two functions of a block.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xent.core.check.cases import Case
from xent.core.spec import BackendInfo, LinearCall, LogitsCall, Stats
from xent.core.teachers import DivergenceCall

__all__ = ["Backend", "Harness", "Unproven"]

Array = TypeVar("Array")


class Backend(Protocol):
    """Serves calls of one framework, perhaps on some devices only. Its module holds one, named `BACKEND`."""

    name: str
    framework: str
    """Whose arrays it serves: "torch", "mlx" or "numpy"."""
    native_to: tuple[str, ...]
    """Device types on which passing this backend over is worth a warning."""

    def missing(self) -> str | None:
        """Return why this machine cannot run the backend, None if it can. Dispatch asks often: keep it cheap."""

    def info(self) -> BackendInfo:
        """Say the same for people, with versions and devices."""

    def refuse(self, call: LogitsCall | LinearCall) -> str | None:
        """Return why this call cannot be served, with what would serve it; None if it can."""

    def run(self, call: LogitsCall | LinearCall) -> tuple[Any, Stats]:
        """Return the loss, an array of the call's framework, and the statistics that `call.loss.stats` names."""

    def refuse_divergence(self, call: DivergenceCall) -> str | None:
        """Return why this divergence cannot be served, with what would serve it; None if it can."""

    def run_divergence(self, call: DivergenceCall) -> tuple[Any, Stats]:
        """Return the divergence, an array of the call's framework, and the statistics that `call.stats` names."""

    def harness(self, device: str | None = None) -> "Harness[Any]":
        """Return what the gradient checks need to drive this backend, on `device` or the best device there is."""


class Unproven(Backend, Protocol):
    """A backend that "auto" may leave to those who name it. Dispatch looks for the method; most backends lack it."""

    def unproven(self) -> str | None:
        """Return why "auto" passes it over without a warning, and what would change that; None if it does not."""


class Harness(Protocol[Array]):
    """Lets the gradient checks (`python -m xent check`, tests/) drive any framework with NumPy arrays."""

    device: str
    dtypes: tuple[str, ...]
    """Names of the float dtypes to check, widest first."""
    processes: int
    """In how many processes the cases run: several where most of the time goes into compiling on the host."""
    kernels: tuple[str, ...]
    """What computes here: the names of the device's kernels, or words for a framework's own operations."""

    def array(self, values: ArrayLike, dtype: str | None = None) -> Array:
        """Return a NumPy array as the framework's array on the device, as `dtype` if given."""

    def numpy(self, array: Array) -> NDArray[np.generic]:
        """Return a framework's array as a NumPy array, floats as float64."""

    def gradients(
        self, function: Callable[..., Any], inputs: tuple[Array, ...], upstream: Any
    ) -> tuple[Any, list[Array]]:
        """Return `function(*inputs)` and its gradients with respect to `inputs`, for `upstream` (ones where None).

        Of a function that returns a tuple, `upstream` is a tuple too, with None for a result that has none.
        """

    def linear(self, input: Array, weight: Array, bias: Array | None) -> Array:
        """Return the logits (..., V) that the unfused computation would hold."""

    def unfused_loss(
        self,
        logits: Array,
        target: Array,
        *,
        weight: Array | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        sample_weight: Array | None = None,
        normalizer: Array | float | None = None,
    ) -> Array:
        """Compute the loss from (..., V) logits with the framework's own differentiable operations.

        Its rounding error is the yardstick; nothing of xent takes part in it.
        """

    def unfused_divergence(
        self,
        logits: Array,
        *,
        teacher: Array | None = None,
        ids: Array | None = None,
        log_probs: Array | None = None,
        tail: str = "",
        beta: float = 0.0,
        temperature: float = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        teacher_scale: float = 1.0,
        reduction: str = "mean",
        sample_weight: Array | None = None,
        normalizer: float | None = None,
    ) -> Array:
        """Compute a divergence from (..., V) logits, and teacher logits or a top-k teacher, as `unfused_loss` does."""

    def unfused_rows(
        self,
        logits: Array,
        target: Array,
        ignored: Array,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: Array | None = None,
        allowed: Array | None = None,
    ) -> dict[str, Array]:
        """Compute lse, nll and entropy (...) from (..., V) logits in the same way; they are 0 in `ignored` rows.

        `target` holds classes, or the probabilities of all; `allowed` (..., V) says which classes a row may take.
        """

    def watched(self) -> AbstractContextManager[set[str]]:
        """Collect what runs meanwhile, complete when the context ends; each begins with one of `kernels`."""

    def reaching(self, function: str, dtype: str) -> list[Case]:
        """Return the cases whose sizes reach every kernel and loop of the device; `python -m xent check` adds them."""

    def passed(self) -> None:
        """Take note that every case has passed on this device."""
