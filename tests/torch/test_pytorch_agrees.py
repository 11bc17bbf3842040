"""Without options that PyTorch lacks, xent equals torch.nn.functional.cross_entropy, with documented exceptions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import xent
from tests.targets import Target
from xent.command.check.case import Case, make_inputs


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("probabilities", [False, True])
def test_reference_equals_pytorch(reduction: str, label_smoothing: float, weighted: bool, probabilities: bool) -> None:
    options = {"probabilities": True} if probabilities else {}
    case = Case("cross_entropy", (30,), 11, "float64", "", options | ({"weight": True} if weighted else {}))
    inputs = make_inputs(case)
    logits, weight = inputs.differentiable["logits"], inputs.options.get("weight")
    expected = F.cross_entropy(
        torch.from_numpy(logits),
        torch.from_numpy(inputs.target),
        weight=None if weight is None else torch.from_numpy(weight),
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    found = xent.cross_entropy(
        logits, inputs.target, weight=weight, reduction=reduction, label_smoothing=label_smoothing
    )
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(5, 7), (2, 7, 3), (2, 7, 3, 4)])
@pytest.mark.parametrize("probabilities", [False, True])
def test_axis_1_is_pytorchs_layout(target: Target, shape: tuple[int, ...], probabilities: bool) -> None:
    rng = np.random.default_rng(0)
    rows = (shape[0], *shape[2:])
    truth = rng.dirichlet(np.ones(7), rows) if probabilities else rng.integers(0, 7, rows)
    truth = np.moveaxis(truth, -1, 1) if probabilities else truth
    dtype, close = ("float64", 1e-12) if target.takes("float64") else ("float32", 1e-5)
    logits, classes = target.arrays(rng.normal(size=shape), truth, dtype=dtype)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    upstream = torch.rand(rows, dtype=logits.dtype, device=target.device)
    xent.cross_entropy(ours, classes, axis=1, reduction="none", backend=target.name).backward(upstream)
    F.cross_entropy(theirs, classes, reduction="none").backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=close, atol=close / 100)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", ["target", "weight", "sample_weight", "normalizer"])
def test_arguments_of_another_dtype_are_converted_to_float32(target: Target, name: str, dtype: torch.dtype) -> None:
    if (name in ("target", "weight") and not dtype.is_floating_point) or (name == "normalizer" and dtype == torch.bool):
        return
    torch.manual_seed(0)
    logits, classes = torch.randn(4, 4, device=target.device), torch.arange(4, device=target.device)
    size = {"normalizer": (), "target": (4, 4)}.get(name, (4,))
    value = (torch.rand(size, device=target.device) + 1).to(dtype)
    losses = [
        xent.cross_entropy(logits, backend=target.name, **{"target": classes, "label_smoothing": 0.1, name: option})
        for option in (value, value.float())
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)


def test_loss_of_half_precision_logits_is_float32(target: Target) -> None:
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        if not target.takes(str(dtype).removeprefix("torch.")):
            continue
        logits, classes = torch.zeros(3, 5, dtype=dtype), torch.zeros(3, dtype=torch.int64)
        loss = xent.cross_entropy(logits.to(target.device), classes.to(target.device), backend=target.name)
        assert loss.dtype == expected
