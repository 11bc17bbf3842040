"""Rows of logits through a public function, and with backend "torch" in float64: results and gradients."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import xent
from xent.core.spec import LOG_PROB_STATS

__all__ = ["CLOSE", "DTYPES", "Rows", "Upstream", "compare", "compare_results"]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_SMALLEST = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 2.0**-23}


class Upstream(NamedTuple):
    """The upstream gradients of a row's results; None for a result that is not used."""

    loss: Tensor | None = None
    lse: Tensor | None = None
    nll: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows (..., V) of a call with reduction "none": a loss, or with a temperature per row log-probabilities."""

    logits: Tensor
    target: Tensor
    weight: Tensor | None = None
    sample_weight: Tensor | None = None
    temperature: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    stats: tuple[str, ...] = ()
    upstream: Upstream = field(default_factory=Upstream)
    backend: str = "triton"

    def run(self, logits: Tensor, **more: Any) -> dict[str, Tensor]:
        """Return the loss and the statistics of each row; with a temperature, minus the log-probability."""
        if self.temperature is None:
            given = {"weight": self.weight, "sample_weight": self.sample_weight, "reduction": "none"}
            made = xent.cross_entropy(
                logits, self.target, stats=self.stats, backend=self.backend, **given, **self.options, **more
            )
            loss, stats = made if self.stats else (made, xent.Stats())
            return {"loss": loss} | {name: getattr(stats, name) for name in self.stats}
        names = tuple(name for name in self.stats if name in LOG_PROB_STATS)
        given = {"temperature": self.temperature, "entropy": "entropy" in self.stats}
        made = xent.log_probs(logits, self.target, stats=names, backend=self.backend, **given, **self.options)
        found = list(made) if isinstance(made, tuple) else [made]
        stats = found.pop() if names else xent.Stats()
        named = {"loss": -found[0]} | {name: getattr(stats, name) for name in names}
        named |= {"nll": -found[0]} if "nll" in self.stats else {}
        return named | ({"entropy": found[1]} if given["entropy"] else {})

    def forward(self) -> dict[str, Tensor]:
        """Return all results of a call without gradients."""
        with torch.no_grad():
            return self.run(self.logits)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient, from a call that keeps the logits and from one in place."""
        used = {name: one for name, one in self.upstream._asdict().items() if one is not None}
        asked = replace(self, stats=tuple(name for name in used if name != "loss"))
        found = {}
        for way in ("beside", "in place") if self.temperature is None else ("beside",):
            leaf = self.logits.detach().requires_grad_()
            if way == "beside":
                made = asked.run(leaf)
            else:
                given = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
                if _overlaps(leaf):
                    continue
                made = asked.run(given.copy_(leaf), inplace=True)
            pairs = [(made[name], one.reshape(made[name].shape).to(made[name].dtype)) for name, one in used.items()]
            (found[way],) = torch.autograd.grad([one for one, _ in pairs], leaf, [one for _, one in pairs])
        return found

    def exact(self) -> "Rows":
        """Return the same rows for backend "torch" on the CPU in float64."""

        def wide(values: Tensor | None) -> Any:
            if values is None:
                return None
            return values.cpu().double() if values.is_floating_point() else values.cpu()

        named = {name: wide(getattr(self, name)) for name in ("logits", "target", "weight", "sample_weight")}
        upstream = Upstream(*map(wide, self.upstream))
        return replace(self, **named, temperature=wide(self.temperature), upstream=upstream, backend="torch")


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def compare(rows: Rows, **close: Any) -> None:
    """Compare results and gradients; `close` overrides the tolerance of gradients."""
    compare_results(rows)
    right, dtype = rows.exact().gradients()["beside"], rows.logits.dtype
    given = {"rtol": CLOSE[dtype], "atol": _SMALLEST[dtype]} | close
    for way, grad in rows.gradients().items():
        torch.testing.assert_close(
            grad.double().cpu(), right, **given, equal_nan=True, msg=lambda text, way=way: f"gradient, {way}: {text}"
        )


def compare_results(rows: Rows) -> None:
    """Compare the results of a call without gradients."""
    expected = rows.exact().forward()
    for name, value in rows.forward().items():
        torch.testing.assert_close(
            value.double().cpu(), expected[name].double(), rtol=4e-6, atol=4e-6, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip
