"""The divisor of a mean over any number of rows, in one block or several, against float64."""

import pytest
import torch

import xent
from tests.covering import dealt
from tests.targets import Target
from xent.backends.triton.kernels.rows_kernel import MOST_COUNTED

V = 37


def test_many_rows(target: Target) -> None:
    """More than one block of 4096 rows. An interpreted call skips the ignored ones, nearly all of them."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 5, generator=generator).to(target.device) for size in (4100, V))
    classes = torch.randint(V, (4100,), generator=generator).to(target.device)
    classes[3 : 4090 if target.interpreted else 900] = -100
    found = xent.linear_cross_entropy(hidden, weight, classes, backend=target.name)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(hidden @ weight.t(), classes))


@pytest.mark.parametrize(
    ("function", "count"), [("cross_entropy", 1), ("cross_entropy", MOST_COUNTED), ("linear_cross_entropy", 5)]
)
def test_rows_counted_by_each_program(
    target: Target, count: int, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as with a divisor from its own launch; on a GPU with an invalid target, which does not count."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(count, 5)] if function == "cross_entropy" else [(count, 4), (5, 4)]
    leaves = [torch.randn(shape, generator=generator).to(target.device).requires_grad_() for shape in shapes]
    classes = torch.randint(5, (count,), generator=generator)
    classes[torch.rand(count, generator=generator) < 0.3] = -100
    if target.device == "cuda" and count > 1:
        classes[1] = 7
    classes, results = classes.to(target.device), []
    for most in (count, 0):
        monkeypatch.setattr("xent.backends.triton.inputs.MOST_COUNTED", most and MOST_COUNTED)
        loss = getattr(xent, function)(*leaves, classes, backend=target.name)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    for counted, divided in zip(*results, strict=True):
        torch.testing.assert_close(counted, divided, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    *dealt(
        2,
        count=[1, 16, 17, 256, 257],
        weights=["none", "weights", "zero", "cancelling", "all ignored"],
        function=["cross_entropy", "linear_cross_entropy"],
    )
)
def test_rows_of_any_number(target: Target, count: int, weights: str, function: str) -> None:
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(V, (count,), generator=generator)
    classes[torch.rand(count, generator=generator) < 0.3] = -100
    sample = torch.rand(count, generator=generator) * (torch.rand(count, generator=generator) < 0.7)
    classes, sample, weight = classes.to(target.device), sample.to(target.device), torch.rand(V, device=target.device)
    classes[0] = 3
    if weights == "none":
        sample, weight = None, None
    elif weights == "zero":
        sample = torch.zeros_like(sample)
    elif weights == "cancelling":
        sample[:] = 0
        sample[0], sample[-1] = (1, -1) if count > 1 else (0, 0)
        classes[-1], weight = classes[0], None
    elif weights == "all ignored":
        classes[:] = -100
    given = [torch.randn(count, V, generator=generator)]
    if function == "linear_cross_entropy":
        given = [torch.randn(count, 5, generator=generator), torch.randn(V, 5, generator=generator)]
        given[0][classes.cpu() == -100] = torch.nan  # must not reach the classifier's gradient
        if weights == "cancelling":
            given[0][0] = torch.nan
    options = {"weight": weight, "sample_weight": sample}
    results = []
    for backend, dtype in ((target.name, torch.float32), ("torch", torch.float64)):
        leaves = [tensor.to(target.device, dtype).requires_grad_() for tensor in given]
        placed = {name: None if value is None else value.to(dtype) for name, value in options.items()}
        loss = getattr(xent, function)(*leaves, classes, backend=backend, **placed)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected.double(), rtol=2e-5, atol=2e-6)
