"""Merging the sums of all ranks: results, saved data and coefficients of the kernel, against PyTorch in float64."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.targets import Target
from tests.triton.noted import note_launches
from xent.backends.torch.facts import gather_facts
from xent.backends.torch.job import Upstream
from xent.backends.torch.options import Options
from xent.backends.torch.results import Results, new_results
from xent.backends.torch.schedule import Part
from xent.backends.torch.sharded.finish import kept_names
from xent.backends.torch.sharded.layout import Layout
from xent.backends.torch.sharded.plain import PlainSteps
from xent.backends.torch.sharded.steps import STEPS, Coefficients, Landing, Shard, Weights
from xent.backends.torch.sharded.sums import Slots, slots_of
from xent.backends.triton import shard_steps as _shard_steps  # noqa: F401  registers the steps
from xent.core.spec import LossSpec

RANGES = (0, 7), (7, 7), (7, 20)
V, ROWS = 20, 9
STATS = ("lse", "nll", "entropy", "predictions", "log_sum_sq_probs", "mean_logit", "z_loss")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing, z_loss": {"label_smoothing": 0.1, "z_loss": 0.05},
    "weight, softcap": {"weight": True, "softcap": 4.0},
    "weight, smoothing, scale": {"weight": True, "label_smoothing": 0.3, "logit_scale": -0.7},
    "temperature, softcap": {"temperature": True, "softcap": 4.0},
    "all smoothing": {"label_smoothing": 1.0},
}


class Call(NamedTuple):
    """Rows of a call on three ranks. The second rank has no classes."""

    logits: Tensor
    target: Tensor
    options: dict[str, Any]
    stats: tuple[str, ...] = STATS
    upstream: bool = False

    @property
    def spec(self) -> LossSpec:
        names = ("label_smoothing", "z_loss", "softcap", "logit_scale")
        return LossSpec("none", stats=self.stats, **{n: self.options[n] for n in names if n in self.options})

    def shard(self, rank: int, dtype: torch.dtype) -> tuple[Shard, Weights | None]:
        """Return a rank's shard and class weights in a dtype."""
        device, heat = self.logits.device, None
        weight = torch.linspace(0, 2, V, dtype=dtype, device=device)
        if self.options.get("temperature"):
            heat = torch.linspace(0.5, 2, ROWS, device=device)
        sample = torch.linspace(0, 2, ROWS, device=device)
        first, stop = RANGES[rank]
        mine = weight[first:stop] if self.options.get("weight") else None
        options = Options(self.target, mine, sample, None, heat, None, None, None, None, self.spec, "triton")
        each = [torch.linspace(n, -n, ROWS, device=device) for n in (1, 2, 3, 4)]
        upstream = Upstream(*each) if self.upstream else None
        facts = gather_facts(options, V, dtype, upstream=upstream, weigh=lambda target: weight[target])
        assert facts.target is not None
        shard = Shard(facts, Layout(None, rank, stop - first, V, RANGES, 13), facts.target - first)
        if mine is None:
            return shard, None
        of_ranks = torch.stack([weight[slice(*both)].sum() for both in RANGES])
        return shard, Weights(weight[facts.target], of_ranks, weight.sum().expand(ROWS))

    def gathered(self, dtype: torch.dtype) -> Slots:
        """Return the sums of all ranks."""
        names = slots_of(self.spec, False, False)
        sums = torch.empty(len(RANGES), len(names), ROWS, dtype=dtype, device=self.logits.device)
        for rank, (first, stop) in enumerate(RANGES):
            logits = self.logits[:, first:stop].to(dtype)
            PlainSteps(self.shard(rank, dtype)[0]).fold(logits, 0, Slots(names, sums[rank]), None)
        return Slots(names, sums)

    def landed(
        self, name: str, dtype: torch.dtype, part: Part | None = None
    ) -> tuple[Results, Tensor, Coefficients, Coefficients]:
        """Return results, saved data, and the coefficients from the forward pass and from the saved data."""
        shard, weights = self.shard(2, dtype)
        facts, part = shard.facts, part or Part(0, ROWS, None, True)
        rows = slice(part.start, part.stop)
        assert facts.target is not None
        if part.rows is not None:  # rows are computed in another order
            order = torch.cat([part.rows] * 9)[:ROWS].clone()
            order[rows] = part.rows
            facts = facts.select(order)
            shard = shard._replace(facts=facts, local=facts.target - RANGES[2][0])
        results = new_results(facts)
        names = kept_names(list(self.stats), False, weights is not None)
        kept = torch.zeros(len(names), ROWS, dtype=dtype, device=self.logits.device)
        sums = self.gathered(dtype)
        sums = Slots(sums.names, sums.values[..., rows if part.rows is None else part.rows].contiguous())
        steps = (STEPS["triton"] if name == "triton" else PlainSteps)(shard)
        landing = Landing(part, results, kept, None, weights, True)
        plain = replace(facts, upstream=None)
        before = (STEPS["triton"] if name == "triton" else PlainSteps)(shard._replace(facts=plain))
        made = before.land(sums, landing)
        assert made is not None
        return results, kept, made, steps.again(kept, part)


def draw(target: Target) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, V, generator=generator)
    classes = torch.randint(V, (ROWS,), generator=generator)
    classes[2], classes[3], classes[4], classes[5] = -100, V, 6, 7  # ignored, invalid, beside a border
    logits[6, classes[6]] = 18
    logits[7, :7] = -torch.inf
    logits[8, [3, 15]] = 30  # equal maxima on two ranks
    logits[2] = torch.nan
    return logits.to(target.device), classes.to(target.device)


def compare(found: Any, right: Any, rows: slice | list[int] = slice(None), close: float = 4e-6) -> None:
    for name, one, other in zip(right._fields if hasattr(right, "_fields") else range(99), found, right, strict=False):
        assert (one is None) == (other is None), name
        if one is not None:
            one, other = (values[..., rows].double() for values in (one, other))
            torch.testing.assert_close(
                one, other, rtol=close, atol=close, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.fixture(autouse=True)
def unlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of target values, as on a GPU, so that kernels see invalid ones."""
    from xent.backends.torch import facts

    monkeypatch.setattr(facts, "looks_at_targets", lambda device: False)


@pytest.mark.parametrize("upstream", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_merged_sums(target: Target, name: str, upstream: bool) -> None:
    call = Call(*draw(target), OPTIONS[name], upstream=upstream)
    found, right = call.landed("triton", torch.float32), call.landed("torch", torch.float64)
    fields = [field for field in Results.__slots__ if field != "norm"]
    alive = [row for row in range(ROWS) if row not in (2, 3)]
    for field in fields:
        one, other = getattr(found[0], field), getattr(right[0], field)
        compare([one[alive]], [other[alive]])
    assert found[0].loss[2] == 0
    assert found[0].loss[3].isnan()
    # What is found of an ignored row of NaN is not used: its gradient is marked as zero.
    computed = [row for row in range(ROWS) if row != 2]
    compare([found[1][:, computed]], [right[1][:, computed]])
    for one, other in zip(found[2:], right[2:], strict=True):
        compare(one, other, computed)
        assert torch.equal(one.zero, other.zero)


@pytest.mark.parametrize("stats", [(), ("entropy",), ("mean_logit",)], ids=str)
@pytest.mark.parametrize("name", ["plain", "weight, smoothing, scale", "temperature, softcap"])
def test_some_rows_in_another_order(target: Target, name: str, stats: tuple[str, ...]) -> None:
    call = Call(*draw(target), OPTIONS[name], stats)
    part = Part(3, 7, torch.tensor([8, 1, 6, 4], device=target.device), False)
    found, right = call.landed("triton", torch.float32, part), call.landed("torch", torch.float64, part)
    compare([found[0].loss], [right[0].loss], slice(3, 7))
    compare([found[1]], [right[1]])
    for one, other in zip(found[2:], right[2:], strict=True):
        compare(one, other)


def test_probable_target_keeps_its_precision(target: Target) -> None:
    logits, classes = draw(target)
    above = torch.linspace(10, 60, ROWS, device=target.device)
    classes = torch.arange(ROWS, device=target.device) + 5
    logits.zero_()[torch.arange(ROWS), classes] = above
    results, kept, made, _ = Call(logits, classes, {}).landed("triton", torch.float32)
    others = (19 * (-above.double()).exp()).log1p()
    torch.testing.assert_close(-kept[2].double(), others, rtol=4e-6, atol=0)
    torch.testing.assert_close(results.nll.double(), others, rtol=4e-6, atol=0)
    right = -torch.linspace(0, 2, ROWS).double().to(target.device) * -(-others).expm1()
    assert made.target is not None
    torch.testing.assert_close(made.target.double(), right, rtol=4e-6, atol=0)


@pytest.mark.parametrize("name", ["weight, softcap", "temperature, softcap"])
def test_saturated_target_keeps_its_precision(target: Target, name: str) -> None:
    """The slope of the softcap at the target is between 0.07 and 2e-5."""
    logits, _ = draw(target)
    logits = logits.nan_to_num()
    classes = torch.arange(ROWS, device=target.device) + 5
    logits[torch.arange(ROWS), classes] = torch.linspace(8, 24, ROWS, device=target.device)
    call = Call(logits, classes, OPTIONS[name])
    found, right = call.landed("triton", torch.float32), call.landed("torch", torch.float64)
    for one, other in zip(found[2:], right[2:], strict=True):
        assert one.target is not None
        assert other.target is not None
        torch.testing.assert_close(one.target.double(), other.target, rtol=4e-6, atol=0)


def test_one_launch_per_part(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = note_launches(monkeypatch)
    Call(*draw(target), OPTIONS["smoothing, z_loss"]).landed("triton", torch.float32)
    assert [name for name, *_ in launches] == ["shard_land_kernel", "shard_again_kernel"]
