"""The kernel launches of a call: how many of which kernel, and no unneeded work."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import xent
from tests.targets import Target
from tests.triton.noted import Launches, note_launches
from xent.backends.torch import linear as linear_driver
from xent.backends.torch.job import Upstream
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.options import Options
from xent.backends.triton import job  # noqa: F401  whose launches are noted
from xent.core.spec import LossSpec

ROWS, WIDTH, V = 6, 8, 64  # a number of classes that CUDA does not pad
PRODUCT = 2 * ROWS * WIDTH * V


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return note_launches(monkeypatch)


def counted(launches: Launches) -> dict[str, int]:
    found = dict(Counter(name.removesuffix("_kernel") for name, *_ in launches))
    launches.clear()
    return found


def draw(target: Target, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits, hidden states, a classifier and classes."""
    torch.manual_seed(0)
    shapes = [(ROWS, V), (ROWS, WIDTH), (V, WIDTH)]
    tensors = [torch.randn(shape, device=target.device).to(dtype).requires_grad_() for shape in shapes]
    return *tensors, torch.arange(ROWS, device=target.device)


FORWARD = {
    "mean": {"rows": 1, "sums": 1},  # few rows: their kernel computes the divisor
    "sum": {"rows": 1, "sums": 1},
    "none": {"rows": 1},
}


@pytest.mark.parametrize("reduction", FORWARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits(target: Target, launches: Launches, reduction: str, dtype: torch.dtype) -> None:
    logits, _, _, classes = draw(target, dtype)
    loss = xent.cross_entropy(logits, classes, reduction=reduction, backend=target.name)
    made_first = reduction != "none" and dtype != torch.float16
    rows = next(given for name, _, given in launches if name == "rows_kernel")
    assert (rows["grad"] is not None) == made_first
    assert (rows["norm"] is not None) != made_first
    assert counted(launches) == FORWARD[reduction]
    torch.autograd.grad(loss, logits, torch.ones_like(loss))
    # The rows' factor is computed again, which costs less than storing it.
    again = {"divisor": 1} if reduction == "mean" else {}
    assert counted(launches) == ({"scale": 1} if made_first else {**again, "gradient": 1})


def test_logits_without_the_last_token(target: Target, launches: Launches) -> None:
    batch = torch.randn(2, 4, V - 1, device=target.device).bfloat16()
    logits = batch[:, :-1].requires_grad_()
    loss = xent.cross_entropy(logits, torch.zeros(2, 3, dtype=torch.int64, device=target.device), backend=target.name)
    assert counted(launches) == FORWARD["mean"]
    torch.autograd.grad(loss, logits)
    assert counted(launches) == {"scale": 1}


@pytest.mark.parametrize("reduction", FORWARD)
@pytest.mark.parametrize("kind", ["no_grad", "inference_mode", "frozen"])
def test_no_gradient_is_written_if_none_is_required(
    target: Target, launches: Launches, reduction: str, kind: str
) -> None:
    logits, hidden, weight, classes = draw(target)
    if kind == "frozen":
        logits, hidden, weight = logits.detach(), hidden.detach(), weight.detach()
    options = {"reduction": reduction, "backend": target.name}
    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "frozen": torch.enable_grad}[kind]():
        xent.cross_entropy(logits, classes, **options)
        rows = next(given for name, _, given in launches if name == "rows_kernel")
        assert rows["grad"] is rows["norm"] is None
        assert counted(launches) == FORWARD[reduction]
        xent.linear_cross_entropy(hidden, weight, classes, **options)
    assert all(given.get("taken") is None for *_, given in launches)
    found = counted(launches)
    assert found.pop("tile", 0) + found.pop("product", 0) == 1
    reduced = {} if reduction == "none" else {"sums": 1}
    assert found == {"take": 1, "finish": 1, **reduced}


@pytest.mark.parametrize("name", ["lse", "predictions", "entropy", "z_loss", "accuracy"])
def test_statistics(target: Target, launches: Launches, name: str) -> None:
    logits, _, _, classes = draw(target)
    xent.cross_entropy(logits, classes, stats=(name,), backend=target.name)
    assert counted(launches) == ({"divisor": 1} if name == "accuracy" else {}) | FORWARD["mean"]


@pytest.mark.parametrize("reduction", FORWARD)
@pytest.mark.parametrize("chunks", [1, 3])
def test_chunks(target: Target, launches: Launches, reduction: str, chunks: int) -> None:
    _, hidden, weight, classes = draw(target)
    options = {"workspace": ROWS // chunks * V * 4, "reduction": reduction, "backend": target.name}
    loss = xent.linear_cross_entropy(hidden, weight, classes, **options)
    forward = counted(launches)
    torch.autograd.grad(loss, (hidden, weight), torch.ones_like(loss))
    backward = counted(launches)
    of_chunks = {"partition": 1, "take": chunks, "rows": chunks}
    if target.device != "cpu" and chunks == 1:
        del of_chunks["partition"]
    if reduction == "none":
        assert forward.get("tile", 0) + forward.get("product", 0) > 0
        assert "rows" not in forward
        assert backward == of_chunks
    else:
        assert forward == {**of_chunks, "sums": 1}
        assert backward == {"scale": 1}


@pytest.mark.parametrize(
    ("count", "given", "divisor"),
    [
        (0, {}, 1),
        (256, {}, 0),
        (257, {}, 1),
        (6, {"normalizer": 3.0}, 1),
        (6, {"sample_weight": torch.ones(6)}, 1),
        (6, {"weight": torch.ones(V)}, 1),
        (6, {"stats": ("count",)}, 1),
        (6, {"target": "probabilities"}, 1),
    ],
)
def test_launches_for_the_divisor(
    target: Target, launches: Launches, count: int, given: dict[str, Any], divisor: int
) -> None:
    logits = torch.randn(count, V, device=target.device)
    classes = torch.zeros(count, dtype=torch.int64, device=target.device)
    options = {name: value for name, value in given.items() if name != "target"}
    options |= {name: value.to(target.device) for name, value in given.items() if isinstance(value, Tensor)}
    wanted = logits.softmax(-1) if "target" in given else classes
    xent.cross_entropy(logits, wanted, backend=target.name, **options)
    assert counted(launches).get("divisor", 0) == divisor


@pytest.mark.parametrize(("ignored", "rows"), [(0, 6), (2, 4), (6, 0)])
def test_ignored_rows_are_neither_computed_nor_multiplied(
    target: Target, launches: Launches, ignored: int, rows: int
) -> None:
    _, hidden, weight, classes = draw(target)
    classes[:ignored] = -100
    options = Options(classes, None, None, None, None, None, None, None, None, LossSpec("mean"), target.name)
    linear = Linear(hidden.detach(), weight.detach(), None, 0, 2 * V * 4, torch.float32, (True, True, False))
    with FlopCounterMode(display=False) as counter:
        linear_driver.forward(linear, options)
    programs = sum(count for name, count, _ in launches if name == "rows_kernel")
    if target.device == "cpu":
        assert programs == rows
        assert counter.get_total_flops() == 3 * PRODUCT * rows // ROWS
    else:  # the first chunk starts before their number is known
        assert programs <= max(rows, 2)


@pytest.mark.parametrize(
    ("needs", "products"),
    [((True, True, True), 3), ((True, False, False), 2), ((False, True, False), 2), ((False, False, True), 1)],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_number_of_matrix_products(
    target: Target, launches: Launches, needs: tuple[bool, bool, bool], products: int, reduction: str
) -> None:
    _, hidden, weight, classes = draw(target)
    options = Options(classes, None, None, None, None, None, None, None, None, LossSpec(reduction), target.name)
    bias = torch.zeros(V, device=target.device)
    linear = Linear(hidden.detach(), weight.detach(), bias, 0, None, torch.float32, needs)
    with FlopCounterMode(display=False) as counter:
        made = linear_driver.forward(linear, options)[2]
        if reduction == "none":
            made = linear_driver.backward(Upstream(torch.ones(ROWS, device=target.device)), linear, options)
    assert counter.get_total_flops() == (products + (reduction == "none")) * PRODUCT
    assert [grad.numel() > 0 for grad in made] == list(needs)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_rows_with_weight_0_have_statistics(target: Target, reduction: str, needs: tuple[bool, bool]) -> None:
    """Their hidden states are replaced by zeros only for the classifier's gradient."""
    _, hidden, weight, classes = draw(target)
    leaves = [hidden.detach().requires_grad_(needs[0]), weight.detach().requires_grad_(needs[1])]
    sample = torch.ones(ROWS, device=target.device)
    sample[2:4] = 0
    names = ("lse", "nll", "entropy", "predictions")
    kinds = {"reduction": reduction, "stats": names, "sample_weight": sample, "workspace": 2 * V * 4}
    for target_of in (classes, torch.nn.functional.one_hot(classes, V).float()):
        found, expected = (
            xent.linear_cross_entropy(*leaves, target_of, backend=backend, **kinds)[1]
            for backend in (target.name, "torch")
        )
        for name in names:
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities(target: Target, launches: Launches, entropy: bool) -> None:
    """One launch forward and one backward. An entropy without an upstream gradient adds no launch."""
    logits, hidden, weight, classes = draw(target)
    made = xent.log_probs(logits, classes, entropy=entropy, backend=target.name)
    log_p = made[0] if entropy else made
    assert counted(launches) == {"rows": 1}
    torch.autograd.grad(log_p.sum(), logits)
    assert launches[-1][2]["entropy_upstream"] is None
    assert counted(launches) == {"gradient": 1}
    made = xent.linear_log_probs(hidden, weight, classes, entropy=entropy, backend=target.name)
    log_p = made[0] if entropy else made
    forward = counted(launches)
    assert forward.pop("tile", 0) + forward.pop("product", 0) == 1
    assert forward == {"take": 1, "finish": 1}
    torch.autograd.grad(log_p.sum(), (hidden, weight))
    assert launches[-1][2].get("entropy_upstream") is None
    backward = counted(launches)
    backward.pop("partition", None)  # on a CPU
    assert backward == {"take": 1, "rows": 1}


def test_support(target: Target, launches: Launches) -> None:
    logits, _, _, classes = draw(target)
    ids = torch.arange(ROWS, device=target.device).repeat_interleave(2)
    ids[1::2] += 7
    support = xent.Support(ids, torch.arange(0, 2 * ROWS + 1, 2, device=target.device))
    found = xent.log_probs(logits, classes, support=support, backend=target.name)
    assert launches[-1][2]["grad"] is None
    assert counted(launches) == {"support": 1}
    torch.autograd.grad(found.sum(), logits)
    assert launches[-1][2]["grad"] is not None
    assert counted(launches) == {"support": 1}
