"""Skipped rows on CUDA: a CUDA graph computes all rows; otherwise the host waits once for their number, after a chunk.

The GPU is simulated on the CPU, which delays or withholds the number of rows.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import xent
from tests.calls import as_on_cuda
from tests.targets import Target
from xent.backends.torch import linear as linear_driver
from xent.backends.torch import schedule
from xent.backends.torch.facts import Facts
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.torch.plain_job import PlainJob
from xent.core.spec import LossSpec

ROWS, WIDTH, V = 8, 8, 72
CALLS: list[tuple[dict[str, Any], bool, int]] = [
    ({}, False, 1),
    ({"stats": ("lse", "predictions", "accuracy", "z_loss")}, True, 4),
    ({"label_smoothing": 0.1, "softcap": 5.0}, True, 1),
    ({}, True, 4),
]
"""(options, whether there is a bias, number of chunks)"""


def job_of(target: Target) -> Any:
    """Return the class of the backend's jobs."""
    if target.name == "torch":
        return PlainJob
    from xent.backends.triton.job import TritonJob

    return TritonJob


class Far(Tensor):
    """A CPU tensor that claims to be on a GPU."""

    device = SimpleNamespace(type="cuda")  # type: ignore[assignment]


@pytest.fixture
def far(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let jobs partition rows as on a GPU, whose number of rows arrives when it is waited for.

    Return a list of the numbers.
    """
    job, waits = job_of(target), []

    class Number:
        def __init__(self, number: Tensor) -> None:
            self.number = number

        def read_usual(self, usual: int) -> int:
            waits.append(int(self.number))
            return waits[-1]

    def unknown(facts: Facts) -> Tensor:
        known = idle(facts)
        return (torch.zeros(len(facts.weight), dtype=torch.bool) if known is None else known).as_subclass(Far)

    def far_partition(self: Any, several: bool) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Facts, "idle", property(unknown))
            order, number = near(self, several)
        if order is None:
            return order, number
        self._order = order.as_subclass(Tensor)
        self._ordered = self._facts.select(self._order)
        return self._order, number.as_subclass(Tensor)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    near, idle = job.partition, Facts.idle.fget
    if job is PlainJob:
        monkeypatch.setattr(job, "partition", far_partition)
    elif target.device == "cpu":
        monkeypatch.setattr(job, "_empty", lambda self, shape, dtype=torch.float32: torch.empty(shape, dtype=dtype))
        monkeypatch.setattr(job, "partition", as_on_cuda(near))
    monkeypatch.setattr(schedule, "HostNumber", Number)
    return waits


@pytest.fixture
def untold(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs compute all rows, as during the capture of a CUDA graph."""
    monkeypatch.setattr(job_of(target), "partition", lambda self, several: (None, self.count))


def draw(target: Target, dtype: torch.dtype, bias: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return (hidden states, classifier and optional bias), classes with some ignored, and row weights with a 0."""
    torch.manual_seed(0)
    sizes = [(ROWS, WIDTH), (V, WIDTH)] + [(V,)] * bias
    leaves = [torch.randn(size, device=target.device).to(dtype).requires_grad_() for size in sizes]
    classes, weights = torch.randint(V, (ROWS,), device=target.device), torch.ones(ROWS, device=target.device)
    classes[2:5], weights[6] = -100, 0
    return leaves, classes, weights


def results(
    target: Target, leaves: list[Tensor], classes: Tensor, chunks: int, copied: bool = False, **options: Any
) -> list[Tensor]:
    """Return the loss, the statistics and the gradients."""
    with torch.autocast(target.device, torch.bfloat16, enabled=copied):
        size = 2 if copied else leaves[0].itemsize
        bias = leaves[2] if len(leaves) > 2 else None
        workspace = -(-ROWS // chunks) * V * size
        made = xent.linear_cross_entropy(
            *leaves[:2], classes, linear_bias=bias, workspace=workspace, backend=target.name, **options
        )
    loss, stats = made if isinstance(made, tuple) else (made, None)
    reported = [getattr(stats, name) for name in options.get("stats", ())]
    return [loss.detach(), *reported, *torch.autograd.grad(loss, leaves, torch.ones_like(loss))]


@pytest.mark.parametrize(("options", "bias", "chunks"), CALLS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("copied", [False, True])
def test_hidden_states_of_ignored_rows_have_no_effect(
    target: Target,
    options: dict[str, Any],
    reduction: str,
    bias: bool,
    chunks: int,
    copied: bool,
    request: pytest.FixtureRequest,
) -> None:
    """`copied`: autocast copies the hidden states, so that the driver may overwrite them."""
    leaves, classes, weights = draw(target, torch.float32 if copied else torch.bfloat16, bias)
    kinds = {"chunks": chunks, "copied": copied, "reduction": reduction, "sample_weight": weights, **options}
    expected = results(target, leaves, classes, **kinds)
    request.getfixturevalue("untold")
    hidden = leaves[0]
    with torch.no_grad():
        hidden[2:5] = torch.nan
        if not options.get("stats"):  # rows with weight 0 have statistics
            hidden[6] = torch.inf
    kept = hidden.detach().clone()
    for found, right in zip(results(target, leaves, classes, **kinds), expected, strict=True):
        close = 2.0**-6 * float(right.detach().abs().max())
        torch.testing.assert_close(found.float(), right.float(), rtol=2.0**-6, atol=close)
    assert torch.equal(hidden.nan_to_num(7), kept.nan_to_num(7))


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize(("options", "bias", "chunks"), CALLS, ids=str)
def test_late_number_of_rows_does_not_change_results(
    target: Target, options: dict[str, Any], bias: bool, chunks: int, ignored: str, request: pytest.FixtureRequest
) -> None:
    leaves, classes, weights = draw(target, torch.float32, bias)
    if ignored == "all":
        classes[:] = -100
    elif ignored == "none":
        classes, weights = classes.clamp(min=0), torch.ones_like(weights)
    kinds = {"chunks": chunks, "sample_weight": weights, **options}
    expected = results(target, leaves, classes, **kinds)
    waits = request.getfixturevalue("far")
    found = results(target, leaves, classes, **kinds)
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one, right, rtol=2e-6, atol=1e-6)
    with_target = {"none": ROWS, "some": ROWS - 3, "all": 0}[ignored]
    due = with_target if "stats" in options or ignored != "some" else with_target - 1
    assert waits == ([due] if chunks > 1 else [])


@pytest.mark.parametrize(("ignored", "computed"), [(0, 8), (3, 5), (7, 2), (8, 2)])
def test_first_chunk_starts_before_the_number_is_known(
    target: Target, far: list[int], ignored: int, computed: int
) -> None:
    """Rows are skipped in all chunks except the first, which has 2 rows."""
    leaves, classes, _ = draw(target, torch.float32, bias=False)
    classes[:] = 1
    classes[:ignored] = -100
    options = Options(classes, None, None, None, None, None, None, None, None, LossSpec("mean"), target.name)
    linear = Linear(*(leaf.detach() for leaf in leaves), None, 0, 2 * V * 4, torch.float32, (True, True, False))
    with FlopCounterMode(display=False) as counter:
        linear_driver.forward(linear, options)
    assert far == [ROWS - ignored]
    assert counter.get_total_flops() == 3 * 2 * computed * WIDTH * V
