"""The divisor of a mean over any number of rows, in one block or several, against float64."""

import pytest
import torch

import xent
from tests.covering import dealt
from tests.targets import Target

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
