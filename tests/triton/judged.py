"""Run rows of logits with a job and with the float64 reference on the same inputs: results and gradients."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xent.backends.reference import BACKEND, cross_entropy_gradient
from xent.backends.torch.job import Upstream
from xent.backends.torch.options import Options
from xent.backends.triton.job import TritonJob
from xent.core.spec import LogitsCall, LossSpec, Support

__all__ = ["CLOSE", "DTYPES", "Rows", "compare"]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_SMALLEST = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 2.0**-23}


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows (..., V) of a call with reduction "none"."""

    logits: Tensor
    target: Tensor
    weight: Tensor | None = None
    sample_weight: Tensor | None = None
    temperature: Tensor | None = None
    support: tuple[Tensor, Tensor] | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    """Fields of the spec other than the reduction."""
    upstream: Upstream = field(default_factory=Upstream)

    @property
    def options(self) -> Options:
        """The options of these rows for a job."""
        spec = LossSpec("none", **self.spec)
        ids, offsets = self.support or (None, None)
        arrays = (self.target, self.weight, self.sample_weight, None, self.temperature, ids, offsets)
        return Options(*arrays, None, None, spec, "triton")

    def job(self, upstream: Upstream | None = None) -> TritonJob:
        """Start a job. With upstream gradients it has no statistics, as in a backward pass."""
        options = self.options
        if upstream is not None:
            options = options._replace(spec=options.spec.without_stats())
        return TritonJob(options, self.logits.shape[-1], self.logits.dtype, 0, upstream, False)

    def forward(self, norm: Tensor | None = None) -> dict[str, Tensor]:
        """Return the loss and the statistics of each row."""
        job = self.job()
        job.logits(self.logits, None, norm)
        loss, stats = job.finish()
        return {"loss": loss} | dict(zip(job.spec.stats, stats, strict=True))

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient from each way to compute it: from the norm, with the fold, and in place."""
        rows = self.logits.shape[:-1].numel()
        norm = torch.empty(3, rows, device=self.logits.device)
        entropy = replace(self, spec=self.spec | {"stats": ("entropy",)}).forward(norm)["entropy"]
        found = {}
        for way in ("norm", "fold", "in place"):
            grad = self.logits.clone() if way == "in place" else torch.empty_like(self.logits)
            job = self.job(self.upstream)
            if way == "norm":
                job.gradient(self.logits, grad, norm, entropy if self.upstream.entropy is not None else None)
            else:
                job.logits(grad if way == "in place" else self.logits, grad, None)
            found[way] = grad
        return found

    def reference(self) -> tuple[dict[str, Any], Any]:
        """Return the same results and the gradient in float64."""

        def numpy(values: Tensor | None) -> Any:
            if values is None:
                return None
            return (values.double() if values.is_floating_point() else values).cpu().numpy()

        support = None if self.support is None else Support(*map(numpy, self.support))
        arrays = (self.logits, self.target, self.weight, self.sample_weight)
        call = LogitsCall(
            *map(numpy, arrays), None, LossSpec("none", **self.spec), -1, False, numpy(self.temperature), support
        )
        with np.errstate(all="ignore"):
            loss, stats = BACKEND.run(call)
            of_loss, *others = (None if one is None else numpy(one) for one in self.upstream)
            named = {name: one for name, one in zip(Upstream._fields[1:], others, strict=True) if one is not None}
            grad = cross_entropy_gradient(call, np.zeros(loss.shape) if of_loss is None else of_loss, **named)
        return {"loss": loss} | {name: getattr(stats, name) for name in call.loss.stats}, grad


def compare(rows: Rows, gradient: bool = True, **close: Any) -> None:
    """Compare results and gradients; `close` overrides the tolerance of gradients."""
    expected, right = rows.reference()
    for name, value in rows.forward().items():
        torch.testing.assert_close(
            value.double().cpu().reshape(-1), torch.from_numpy(np.asarray(expected[name], np.float64)).reshape(-1),
            rtol=4e-6, atol=4e-6, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip
    dtype = rows.logits.dtype
    given = {"rtol": CLOSE[dtype], "atol": _SMALLEST[dtype]} | close
    for way, grad in rows.gradients().items() if gradient else ():
        torch.testing.assert_close(
            grad.double().cpu(), torch.from_numpy(right), **given, equal_nan=True,
            msg=lambda text, way=way: f"gradient, {way}: {text}",
        )  # fmt: skip
