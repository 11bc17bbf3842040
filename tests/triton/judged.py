"""Rows of logits through a public function, and with backend "torch" in float64: results and gradients."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import xent
from tests.targets import Target
from xent.core.spec import ROW_STATS

__all__ = ["ASKED", "CLOSE", "DTYPES", "OPTIONS", "Rows", "Upstream", "compare", "compare_results", "draw", "padded"]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "weight, z_loss": {"weight": True, "z_loss": 0.1},
    "weight, smoothing, z_loss": {"weight": True, "label_smoothing": 0.2, "z_loss": 0.1},
    "scale": {"logit_scale": -0.7},
    "softcap": {"softcap": 4.0},
    "softcap, scale, smoothing": {"softcap": 4.0, "logit_scale": 1.5, "label_smoothing": 0.1},
    "sample_weight, softcap": {"sample_weight": True, "softcap": 30.0},
    "all": {
        "weight": True, "label_smoothing": 0.1, "z_loss": 0.02, "softcap": 5.0, "logit_scale": 0.8,
        "sample_weight": True,
    },
}  # fmt: skip
ASKED: dict[str, tuple[str, ...]] = {
    "loss": ("loss",),
    "all": ("loss", "lse", "nll", "entropy"),
    "loss and entropy": ("loss", "entropy"),
    "entropy": ("entropy",),
    "lse": ("lse",),
    "loss and nll": ("loss", "nll"),
}


class Upstream(NamedTuple):
    """The upstream gradients of a row's results; None for a result that is not used."""

    loss: Tensor | None = None
    lse: Tensor | None = None
    nll: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows (..., V) of a loss with reduction "none"."""

    logits: Tensor
    target: Tensor
    weight: Tensor | None = None
    sample_weight: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    stats: tuple[str, ...] = ()
    upstream: Upstream = field(default_factory=Upstream)
    backend: str = "triton"

    def run(self, logits: Tensor, **more: Any) -> dict[str, Tensor]:
        """Return the loss and the statistics of each row."""
        given = {"weight": self.weight, "sample_weight": self.sample_weight, "reduction": "none"} | self.options | more
        made = xent.cross_entropy(logits, self.target, stats=self.stats, backend=self.backend, **given)
        loss, stats = made if self.stats else (made, xent.Stats())
        return {"loss": loss} | {name: getattr(stats, name) for name in self.stats}

    def forward(self) -> dict[str, Tensor]:
        """Return all results of a call without gradients."""
        with torch.no_grad():
            return self.run(self.logits)

    def gradients(self) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
        """Return the gradient and the results of a call that keeps the logits, in place, and of the sum of losses."""
        used = {name: one for name, one in self.upstream._asdict().items() if one is not None}
        asked = replace(self, stats=tuple(name for name in used if name != "loss"))
        ways: dict[str, dict[str, Any]] = {"beside": {}, "in place": {"inplace": True}}
        ways |= {} if asked.stats else {"of the sum": {"reduction": "sum"}}
        found = {}
        for way, options in ways.items():
            leaf = given = self.logits.detach().requires_grad_()
            if "inplace" in options:
                given = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf)
            made = asked.run(given, **options)
            pairs = [(made[name], one) for name, one in used.items()]
            upstream = None if "reduction" in options else [one.reshape(out.shape).to(out) for out, one in pairs]
            found[way] = torch.autograd.grad([out for out, _ in pairs], leaf, upstream)[0], made
        return found

    def exact(self) -> "Rows":
        """Return the same rows for backend "torch" on the CPU in float64."""

        def wide(values: Tensor | None) -> Any:
            if values is None:
                return None
            return values.cpu().double() if values.is_floating_point() else values.cpu()

        named = {name: wide(getattr(self, name)) for name in ("logits", "target", "weight", "sample_weight")}
        upstream = Upstream(*map(wide, self.upstream))
        return replace(self, **named, upstream=upstream, backend="torch")


def compare(rows: Rows, least: float = 4e-6, **close: Any) -> None:
    """Compare results, up to `least` near 0, and gradients, whose tolerance `close` overrides."""
    compare_results(rows, least)
    right, dtype = rows.exact().gradients(), rows.logits.dtype
    alone = not any(one is not None for one in rows.upstream[1:])
    smallest = {torch.float16: 2.0**-24 if alone else 2.0**-23}.get(dtype, 2e-7 if alone else 1e-6)
    given = {"rtol": CLOSE[dtype] if alone else max(CLOSE[dtype], 4e-6), "atol": smallest} | close
    for way, (grad, made) in rows.gradients().items():
        expected, results = right["beside" if way == "in place" else way]
        _close(f"gradient, {way}", grad, expected, **given)
        for name, value in made.items():
            _close(f"{name}, {way}", value, results[name], rtol=3e-6, atol=min(least, 2e-7) if alone else least)


def compare_results(rows: Rows, least: float = 4e-6) -> None:
    """Compare the results of a call without gradients."""
    expected = rows.exact().forward()
    for name, value in rows.forward().items():
        _close(name, value, expected[name], rtol=4e-6, atol=least)


def _close(name: str, found: Tensor, expected: Tensor, **close: float) -> None:
    torch.testing.assert_close(
        found.double().cpu(), expected.double(), **close, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def padded(values: Tensor, start: int = 0) -> Tensor:
    """Return a copy that begins `start` elements after a boundary, in memory of whole vectors, as on a GPU."""
    memory = torch.full((-(-(start + values.numel()) // 8) * 8,), 1000, dtype=values.dtype, device=values.device)
    return memory[start : start + values.numel()].view(values.shape).copy_(values)


def draw(
    target: Target, vocabulary: int, dtype: torch.dtype, options: str = "plain", asked: str = "all", rows: int = 5
) -> Rows:
    """Return rows with the first and the last class, some ignored; with weights, one of them has weight 0.

    With an odd number of classes, five rows have different offsets from a boundary of memory.
    """
    generator = torch.Generator().manual_seed(vocabulary)
    given = dict(OPTIONS[options])
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    classes = torch.randint(vocabulary, (rows,), generator=generator)
    classes[0], classes[-1], classes[2::4] = 0, vocabulary - 1, -100
    weight, sample = 2 * torch.rand(vocabulary, generator=generator), 0.5 + torch.rand(rows, generator=generator)
    weight[::7], sample[1] = 0, 0
    upstream = torch.randn(4, rows, generator=generator).to(target.device)
    return Rows(
        padded(logits.to(target.device, dtype)),
        classes.to(target.device),
        weight.to(target.device) if given.pop("weight", False) else None,
        sample.to(target.device) if given.pop("sample_weight", False) else None,
        options=given,
        stats=() if asked == "loss" else ROW_STATS,
        upstream=Upstream(
            *(one if name in ASKED[asked] else None for name, one in zip(Upstream._fields, upstream, strict=True))
        ),
    )
