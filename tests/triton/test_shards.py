"""The kernels for one rank of a vocabulary in shards: every sum and the gradient, against float64."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.targets import Target
from xent.backends.torch.activation import activate
from xent.backends.torch.facts import gather_facts
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.torch.rows import Rows
from xent.backends.torch.schedule import Part
from xent.backends.torch.sharded.layout import Layout
from xent.backends.torch.sharded.plain import PlainSteps
from xent.backends.torch.sharded.steps import STEPS, Coefficients, Shard
from xent.backends.torch.sharded.sums import Slots, finite, logits_of_targets, merge, slots_of
from xent.backends.triton import shard_steps
from xent.core.spec import LossSpec

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
BEFORE, AFTER = 5, 9  # classes of the neighbouring ranks
ALL = ("entropy", "log_sum_sq_probs", "mean_logit", "predictions")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "weight, smoothing": {"label_smoothing": 0.2, "weight": True},
    "scale": {"logit_scale": -0.7},
    "softcap, scale, smoothing": {"softcap": 4.0, "logit_scale": 1.5, "label_smoothing": 0.1},
    "temperature, softcap": {"temperature": True, "softcap": 4.0},
}


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of one rank's classes."""

    logits: Tensor
    """(R, C)."""
    local: Tensor
    """(R,) int64: each target relative to this rank's first class; outside of [0, C) if another rank has it."""
    options: dict[str, Any] = field(default_factory=dict)
    stats: tuple[str, ...] = ALL

    @property
    def spec(self) -> LossSpec:
        names = ("label_smoothing", "softcap", "logit_scale")
        return LossSpec("none", stats=self.stats, **{n: self.options[n] for n in names if n in self.options})

    def shard(self, dtype: torch.dtype) -> Shard:
        """Return the shard for logits of a dtype."""
        rows, classes = self.logits.shape
        device = self.logits.device
        vocabulary = BEFORE + classes + AFTER
        weight = torch.linspace(0, 2, classes, device=device) if self.options.get("weight") else None
        heat = torch.linspace(0.5, 2, rows, device=device) if self.options.get("temperature") else None
        target = self.local + BEFORE
        options = Options(target, weight, None, None, heat, None, None, None, None, self.spec, "triton")
        facts = gather_facts(options, vocabulary, dtype, weigh=lambda target: torch.ones_like(target, dtype=dtype))
        ranges = (0, BEFORE), (BEFORE, BEFORE + classes), (BEFORE + classes, vocabulary)
        layout = Layout(None, 1, classes, vocabulary, ranges, max(stop - first for first, stop in ranges))
        return Shard(facts, layout, self.local)

    def slots(self, dtype: torch.dtype) -> Slots:
        names = slots_of(self.spec, False, False)
        return Slots(names, torch.full((len(names), len(self.logits)), NAN, dtype=dtype, device=self.logits.device))


def absolute(piece: Piece, found: Slots) -> dict[str, Tensor]:
    """Return the sums in float64, relative to 0 instead of each row's reference."""
    classes = piece.logits.shape[1]
    owned = (piece.local >= 0) & (piece.local < classes)
    weight = piece.shard(torch.float64).facts.class_weight
    if weight is None:
        weight = torch.ones(classes, dtype=torch.float64, device=owned.device)
    of_target = torch.where(owned, weight[piece.local.clamp(0, classes - 1)], 0)
    named = {name: found[name].double() for name in found.names if name != "place"}
    if "place" in found:
        named["place"] = found.integers("place").double()
    named["peak"], reference = torch.where(named["total"] == 0, -INF, 0.0), finite(named["peak"])
    if "deficit" in named:
        named["deficit"] = named["deficit"] / classes - reference
    if "below" in named:
        named["below"] = (named["below"] - (weight.sum() - of_target) * reference) / classes
    if "mixed" in named:
        named["mixed"] = named["mixed"] / named["total"] + reference
    if "squares" in named:
        named["squares"] = named["squares"].log() + 2 * reference
    named["total"] = named["total"].log() + reference
    return named


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the smallest blocks, of two vectors."""
    monkeypatch.setattr(shard_steps, "_OF_FOLD", (0, 1024))
    monkeypatch.setattr(shard_steps, "_OF_GRADIENT", (0, 1024))


def draw(target: Target, classes: int, dtype: torch.dtype, rows: int = 5) -> tuple[Tensor, Tensor]:
    """Return logits and targets: the first class, the last, classes of both neighbouring ranks, and one in between."""
    generator = torch.Generator().manual_seed(classes)
    logits = (3 * torch.randn(rows, classes, generator=generator)).to(target.device, dtype)
    local = torch.tensor([0, classes - 1, -3, classes + 2, classes // 2], device=target.device)
    return logits, local[:rows]


def check_fold(piece: Piece, exact: Tensor | None = None) -> None:
    """Compare every sum with PyTorch's steps in float64. Infinite values and NaN must be equal too."""
    found, right = piece.slots(torch.float32), piece.slots(torch.float64)
    STEPS["triton"](piece.shard(torch.float32)).fold(piece.logits, 0, found, exact)
    wide = None if exact is None else exact.double()
    PlainSteps(piece.shard(torch.float64)).fold(piece.logits.double(), 0, right, wide)
    check_slots(piece, found, right)


def check_slots(piece: Piece, found: Slots, right: Slots) -> None:
    expected = absolute(piece, right)
    for name, values in absolute(piece, found).items():
        torch.testing.assert_close(
            values, expected[name], rtol=4e-6, atol=4e-6, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def coefficients(piece: Piece, dtype: torch.dtype) -> Coefficients:
    """Return coefficients for the exact sums of each row, with an upstream gradient of the entropy."""
    rows = len(piece.logits)
    z = piece.logits.double()
    shard = piece.shard(torch.float64)
    x = activate(z.clone(), piece.spec, shard.facts.bend)
    lse = x.logsumexp(1)
    peak = x.amax(1) - 2
    along = torch.linspace(-1, 2, rows, dtype=torch.float64, device=z.device)
    delta = 0.01 * along if piece.spec.label_smoothing else None
    zero = torch.arange(rows, device=z.device) % 4 == 3
    made = Coefficients(peak, lse - peak, along + 0.3, 0.2 - along, delta, None, None, 5 + along, zero)
    return Coefficients(*(one if one is None or one.dtype == torch.bool else one.to(dtype) for one in made))


def check_gradient(piece: Piece) -> None:
    """Compare with the definition in float64, in place and out of place."""
    dtype = piece.logits.dtype
    right = piece.logits.double()
    PlainSteps(piece.shard(torch.float64)).gradient(right, 0, coefficients(piece, torch.float64), right)
    steps, made = STEPS["triton"](piece.shard(torch.float32)), coefficients(piece, torch.float32)
    elsewhere = torch.full_like(piece.logits, NAN)
    steps.gradient(piece.logits, 0, made, elsewhere)
    within = piece.logits.clone()
    steps.gradient(within, 0, made, within)
    assert torch.equal(within, elsewhere)
    smallest = 2.0**-24 if dtype == torch.float16 else 2e-6
    torch.testing.assert_close(elsewhere.double(), right, rtol=CLOSE[dtype], atol=smallest)
    assert torch.equal(right[3], torch.zeros_like(right[3]))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 33, 64])
def test_sizes(target: Target, classes: int, dtype: torch.dtype) -> None:
    """Sizes around multiples of a vector and of a block, each with some of the options."""
    names = list(OPTIONS)
    for name in {names[classes % len(names)], names[(classes + 2) % len(names)]}:
        piece = Piece(*draw(target, classes, dtype), OPTIONS[name])
        check_fold(piece)
        check_gradient(piece)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_options(target: Target, name: str, dtype: torch.dtype) -> None:
    piece = Piece(*draw(target, 1001, dtype), OPTIONS[name])
    check_fold(piece)
    check_gradient(piece)


@pytest.mark.parametrize("stats", [(), *((name,) for name in ALL)], ids=str)
def test_only_needed_sums_are_computed(target: Target, stats: tuple[str, ...]) -> None:
    for options in ("plain", "smoothing"):
        check_fold(Piece(*draw(target, 33, torch.float32), OPTIONS[options], stats))


def test_no_classes(target: Target) -> None:
    piece = Piece(torch.empty(5, 0, device=target.device), torch.arange(-2, 3, device=target.device))
    found, right = piece.slots(torch.float32), piece.slots(torch.float32)
    steps = STEPS["triton"](piece.shard(torch.float32))
    steps.fold(piece.logits, 0, found, None)
    PlainSteps(piece.shard(torch.float32)).fold(piece.logits, 0, right, None)
    assert torch.equal(found.values.view(torch.int32), right.values.view(torch.int32))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("name", ["weight, smoothing", "scale"])
def test_rows_inside_a_larger_buffer(target: Target, name: str, dtype: torch.dtype, start: int) -> None:
    """Some rows of a call, aligned and not. Columns on both sides and other rows must stay unchanged."""
    classes, columns = 37, 48 if not start else 45
    room = torch.full((7, columns), 1000, dtype=dtype, device=target.device)
    logits, local = draw(target, classes, dtype)
    here = room[1:6, start : start + classes]
    here.copy_(logits)
    whole = Piece(torch.cat([logits[:1]] * 2 + [logits]), torch.cat([local[:1]] * 2 + [local]), OPTIONS[name])
    piece = Piece(logits, local, OPTIONS[name])
    found, right = piece.slots(torch.float32), piece.slots(torch.float64)
    steps = STEPS["triton"](whole.shard(torch.float32))
    steps.fold(here, 2, found, None)
    PlainSteps(piece.shard(torch.float64)).fold(logits.double(), 0, right, None)
    check_slots(piece, found, right)
    made, elsewhere = coefficients(piece, torch.float32), torch.empty_like(logits)
    steps.gradient(logits, 2, made, elsewhere)
    steps.gradient(here, 2, made, here)
    torch.testing.assert_close(here, elsewhere, rtol=CLOSE[dtype], atol=1e-6)
    here.fill_(1000)
    assert torch.equal(room, torch.full_like(room, 1000))


def test_wide_logits_and_a_narrow_gradient(target: Target) -> None:
    logits, local = draw(target, 37, torch.float32)
    piece = Piece(logits, local, OPTIONS["smoothing"])
    room, narrow = (torch.zeros(5, 64, dtype=dtype, device=target.device) for dtype in (torch.float32, torch.bfloat16))
    room[:, :37] = logits
    steps, made, right = STEPS["triton"](piece.shard(torch.float32)), coefficients(piece, torch.float32), logits.clone()
    steps.gradient(room[:, :37], 0, made, narrow[:, :37])
    steps.gradient(right, 0, made, right)
    torch.testing.assert_close(narrow[:, :37], right.bfloat16(), rtol=2.0**-7, atol=1e-6)
    assert not narrow[:, 37:].any()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_target_logits_replace_rounded_ones(target: Target, dtype: torch.dtype) -> None:
    logits, local = draw(target, 33, dtype)
    exact = 4 + torch.rand(5, generator=torch.Generator().manual_seed(0)).to(target.device)
    check_fold(Piece(logits, local, OPTIONS["weight, smoothing"]), exact)
    check_fold(Piece(logits, local, OPTIONS["softcap, scale, smoothing"]), exact)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", ["softcap, scale, smoothing", "temperature, softcap"])
def test_ranks_send_raw_logits_of_targets(target: Target, name: str, dtype: torch.dtype) -> None:
    logits, local = draw(target, 33, dtype)
    piece = Piece(logits, local, OPTIONS[name])
    right = torch.where((local >= 0) & (local < 33), logits.float().gather(1, local.clamp(0, 32)[:, None])[:, 0], 0)
    for steps in (STEPS["triton"], PlainSteps):
        found = piece.slots(torch.float32)
        steps(piece.shard(torch.float32)).fold(logits, 0, found, None)
        assert torch.equal(found["target"], right)


KINDS: dict[str, Callable[[Tensor, int], Any]] = {
    "sure": lambda row, y: row[y].fill_(40),
    "surest": lambda row, y: row[y].fill_(3e4),
    "hopeless": lambda row, y: row[y].fill_(-3e4),
    "first block far below": lambda row, y: row[:8].fill_(-3e4),
    "first block below": lambda row, y: row[:16].sub_(60),
    "first block far above": lambda row, y: row[:8].add_(300),
    "last block far above": lambda row, y: row[-8:].add_(300),
    "all far above": lambda row, y: row.add_(2000),
    "all far below": lambda row, y: row.sub_(2000),
    "all below": lambda row, y: row.sub_(20),
    "first block impossible": lambda row, y: row[:16].fill_(-INF),
    "first block impossible, all below": lambda row, y: [row.sub_(20), row[:16].fill_(-INF)],
    "first block impossible, sure below": lambda row, y: [row.sub_(60), row[:16].fill_(-INF), row[y].fill_(-20)],
    "last block impossible": lambda row, y: row[-8:].fill_(-INF),
    "target impossible": lambda row, y: row[y].fill_(-INF),
    "target alone possible": lambda row, y: [row[:y].fill_(-INF), row[y + 1 :].fill_(-INF)],
    "all impossible": lambda row, y: row.fill_(-INF),
    "one infinite": lambda row, y: row[y - 1].fill_(INF),
    "one NaN": lambda row, y: row[y - 1].fill_(NAN),
    "target NaN": lambda row, y: row[y].fill_(NAN),
    "all NaN": lambda row, y: row.fill_(NAN),
}


def lost(piece: Piece, found: Slots) -> Tensor:
    """Return -log p of each row's target among the classes of this rank only, computed like the merged result."""
    layout = Layout(None, 0, 0, piece.logits.shape[1], ((0, piece.logits.shape[1]),), 0)
    gathered = Slots(found.names, found.values[None])
    log_p = merge(gathered, layout, piece.local, logits_of_targets(gathered), None, None, False).log_p
    assert log_p is not None
    return -log_p.double()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("classes", "y"), [(31, 3), (48, 20), (31, 30)])
def test_hard_rows(target: Target, dtype: torch.dtype, classes: int, y: int) -> None:
    """The target in the first, a middle and the last block. The loss of a very probable target keeps its precision."""
    logits, _ = draw(target, classes, dtype, rows=len(KINDS))
    for row, kind in zip(logits, KINDS.values(), strict=True):
        kind(row, y)
    piece = Piece(logits, torch.full((len(KINDS),), y, device=target.device), stats=("predictions",))
    found = piece.slots(torch.float32)
    STEPS["triton"](piece.shard(torch.float32)).fold(logits, 0, found, None)
    x = logits.double()
    others = torch.cat([x[:, :y], x[:, y + 1 :]], 1).logsumexp(1)
    right = torch.nn.functional.softplus(others - x[:, y], threshold=50)
    right = torch.where((x.amax(1) == INF) | x.isnan().any(1), NAN, right)
    right[list(KINDS).index("all impossible")] = INF
    for kind, one, other in zip(KINDS, lost(piece, found), right, strict=True):
        torch.testing.assert_close(
            one, other, rtol=4e-6, atol=1e-30, equal_nan=True, msg=lambda text, kind=kind: f"{kind}: {text}"
        )
    calm = torch.tensor([not bool(row.isnan().any()) for row in logits], device=target.device)
    expected = x.argmax(1).int() + BEFORE
    assert torch.equal(found.integers("place")[calm], expected[calm].int())


@pytest.mark.usefixtures("small")
def test_rows_are_read_again_if_a_sum_of_squares_overflows(target: Target) -> None:
    logits, local = draw(target, 48, torch.float32)
    logits[:, :8] -= 50
    check_fold(Piece(logits, local, OPTIONS["smoothing"]))


@pytest.mark.usefixtures("small")
def test_probable_target_in_the_first_block_causes_no_second_read(target: Target) -> None:
    logits, _ = draw(target, 48, torch.float32)
    logits[:, 40], logits[:, 3] = 9, 40
    piece = Piece(logits, torch.full((5,), 3, device=target.device))
    found = piece.slots(torch.float32)
    STEPS["triton"](piece.shard(torch.float32)).fold(logits, 0, found, None)
    assert torch.equal(found["peak"], torch.cat([logits[:, :3], logits[:, 4:8]], 1).amax(1))


@pytest.mark.parametrize("stats", [(), ("lse",)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_taken_rows(target: Target, dtype: torch.dtype, stats: tuple[str, ...]) -> None:
    """Some rows of a call in another order, some of them without a gradient.

    The logits of other ranks' targets are 0.
    """
    logits, local = draw(target, 7, torch.float32)
    shard = Piece(logits, local, stats=stats).shard(torch.float32)
    dead = torch.tensor([False, True, False, False, True], device=target.device)
    shard = shard._replace(facts=replace(shard.facts, dead=dead))
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).to(target.device) for shape in ((6, 9), (7, 18), (7,))
    )
    linear = Linear(hidden, weight[:, ::2], bias, 0, None, dtype, (True, True, True))
    for part in (Part(1, 5, None, True), Part(1, 5, torch.tensor([5, 0, 3, 2], device=target.device), True)):
        found, right = (steps(shard).take(linear, part) for steps in (STEPS["triton"], PlainSteps))
        alive = ~dead[1:5] | bool(stats)
        assert torch.equal(found.trained, right.trained)
        assert torch.equal(found.hidden[alive], right.hidden[alive])
        assert (found.target_logits is None) == (right.target_logits is None) == (dtype == torch.float32)
        if found.target_logits is not None and right.target_logits is not None:
            owned = (local[1:5] >= 0) & (local[1:5] < 7)
            expected = torch.where(owned, right.target_logits, 0)
            torch.testing.assert_close(found.target_logits, expected, rtol=1e-5, atol=1e-5)


def test_probabilities_use_the_steps_in_pytorch(target: Target) -> None:
    piece = Piece(*draw(target, 7, torch.float32))
    shard = piece.shard(torch.float32)
    probabilities = shard._replace(facts=replace(shard.facts, probabilities=Rows(torch.ones(5, 7)), target=None))
    assert isinstance(STEPS["triton"](probabilities), PlainSteps)
    assert not isinstance(STEPS["triton"](shard), PlainSteps)
