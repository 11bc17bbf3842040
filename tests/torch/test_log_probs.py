"""Log-probabilities, entropy and their gradients, against plain PyTorch's autograd and the float64 reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import xent
from tests.covering import covering
from tests.targets import Target
from tests.torch.sampled import Problem

DTYPES = ("float64", "float32", "bfloat16", "float16")
UNITS = {"float64": 2.0**-46, "float32": 2.0**-22, "bfloat16": 2.0**-6, "float16": 2.0**-9}
UPSTREAM = ((True, False, False), (False, True, False), (False, False, True), (True, True, True), (True, True, False))

FACTORS: dict[str, tuple[dict[str, Any], ...]] = {
    "function": ({}, {"axis": 0}, {"linear": True}, {"linear": True, "bias": True, "shift": 2}),
    "temperature": ({}, {"temperature": 0.6}, {"temperature": "rows"}),
    "softcap": ({}, {"softcap": 3.0}),
    "scale": ({}, {"logit_scale": 1.5}, {"logit_scale": -0.7}),
    "support": ({}, {"support": 6}, {"support": 23}),
    "upstream": tuple({"upstream": one} for one in UPSTREAM),
    "dtype": tuple({"dtype": one} for one in DTYPES),
}
SHAPES = (
    {"rows": ()},
    {"rows": (1,)},
    {"rows": (7,)},
    {"rows": (2, 3, 4)},
    {"rows": (0,), "upstream": (True, True, True)},
    {"rows": (2, 0, 3)},
    {"classes": 1},
    {"classes": 2, "support": 1},
    {"rows": (2, 4), "ignored": 1.1},
    {"rows": (2, 4), "ignored": 1.1, "support": 5},
    {"infinite": True, "support": None},
    {"classes": 3001, "rows": (2, 9)},
    {"classes": 3001, "rows": (2, 9), "support": 700},
)
PROBLEMS = [
    Problem(seed=seed, **{name: value for setting in row.values() for name, value in setting.items()})
    for seed, row in enumerate(covering(FACTORS, 2, "log-probabilities"))
] + [
    replace(Problem(temperature="rows", softcap=9.0), linear=linear, **shape)
    for shape in SHAPES
    for linear in (False, True)
    if not (linear and shape.get("infinite"))
]


Errors = list[tuple[float, float]]
"""(error, bound) of each output and gradient."""


def judged(made: Tensor, truth: Tensor, plain: Tensor, dtype: str) -> tuple[float, float]:
    """Compare a gradient row by row, as `xent.command.check.judge` does."""
    made, truth, plain = (torch.atleast_2d(one.detach().double().cpu()) for one in (made, truth, plain))
    assert made.shape == truth.shape
    size = truth.norm(dim=-1)
    error, allowed = ((one - truth).norm(dim=-1) for one in (made, plain))
    assert not error[size == 0].any(), "a row without a gradient has one"
    if not (size > 0).any():
        return 0.0, 1.0
    errors = [float((one[size > 0] / size[size > 0]).amax()) for one in (error, allowed)]
    return errors[0], 1.5 * errors[1] + UNITS[dtype]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_values_and_gradients(target: Target, problem: Problem) -> None:
    """If a draw exceeds its bounds, the worst of eight draws decides, as in the matrix."""
    if not target.takes(problem.dtype):
        return
    draws = [compared(target, problem)]
    if any(error > bound for error, bound in draws[0]):
        draws += [compared(target, replace(problem, seed=problem.seed + 100 * more)) for more in range(1, 8)]
    for results in zip(*draws, strict=True):
        errors, bounds = zip(*results, strict=True)
        assert max(errors) <= max(bounds)


def compared(target: Target, problem: Problem) -> Errors:
    drawn, wide = problem.draw(), "float64" if problem.dtype == "float64" else "float32"
    outputs, gradients, _ = drawn.ours(target.device, backend=target.name)
    truth, true_gradients = drawn.plain("float64", exact=True)
    close, _ = drawn.plain(wide, exact=True)
    _, plain_gradients = drawn.plain()
    found: Errors = []
    for made, right, near in zip(outputs, truth, close, strict=True):
        assert made.dtype == getattr(torch, wide)
        assert torch.equal(made.detach().cpu().isinf(), right.isinf())
        finite = right.isfinite()
        if finite.any():
            size = 1 + float(right[finite].detach().abs().amax())
            errors = [float((one - right)[finite].detach().abs().amax()) for one in (made.cpu(), near)]
            found.append((errors[0], 1.5 * errors[1] + 2 * UNITS[wide] * size))
    for made, right, near, same in zip(gradients, true_gradients, plain_gradients, drawn.reference(), strict=True):
        np.testing.assert_allclose(right.numpy(), same, rtol=1e-8, atol=1e-11)
        found.append(judged(made, right, near, problem.dtype))
    return found


@pytest.mark.parametrize("linear", [False, True])
def test_temperature_of_one_tensor(target: Target, linear: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    source = [torch.randn(2, 3, 8, generator=generator).to(target.device).requires_grad_()]
    source += [torch.randn(8, 8, generator=generator).to(target.device).requires_grad_()] if linear else []
    classes = torch.randint(8, (2, 3), generator=generator).to(target.device)
    function = xent.linear_log_probs if linear else xent.log_probs

    def results(heat: Any) -> list[Tensor]:
        found = function(*source, classes, temperature=heat, softcap=5.0, entropy=True, backend=target.name)
        return [*found, *torch.autograd.grad(sum(found).sum(), source)]

    heat = torch.tensor(0.7, device=target.device)
    for found, expected in zip(results(heat), results(0.7), strict=True):
        torch.testing.assert_close(found, expected)
    if target.looks_at_targets:
        with pytest.raises(ValueError, match=r"temperature must be > 0 in every row, got 0.0 at \[0, 0\]"):
            results(heat * 0)
    with pytest.raises(TypeError, match="temperature must be a number, or an array of floats; got torch array"):
        results(torch.tensor(1, device=target.device))
