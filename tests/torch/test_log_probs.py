"""Log-probabilities, entropy and their gradients, against plain PyTorch's autograd and the float64 reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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


def judge(made: Any, truth: Any, plain: Any, dtype: str) -> None:
    """Compare gradients row by row, as `xent.core.check.judge` does."""
    made, truth, plain = (np.atleast_2d(one.detach().double().cpu().numpy()) for one in (made, truth, plain))
    assert made.shape == truth.shape
    size = np.linalg.norm(truth, axis=-1)
    error, allowed = (np.linalg.norm(one - truth, axis=-1) for one in (made, plain))
    assert not error[size == 0].any(), "a row without a gradient has one"
    if (size > 0).any():
        worst = (allowed[size > 0] / size[size > 0]).max()
        assert (error[size > 0] / size[size > 0]).max() <= 1.5 * worst + UNITS[dtype]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_values_and_gradients(target: Target, problem: Problem) -> None:
    if not target.takes(problem.dtype):
        return
    for seed in range(8):
        try:
            check(target, replace(problem, seed=problem.seed + 100 * seed))
        except AssertionError:
            if seed == 7 or problem.dtype in ("float32", "float64"):
                raise
        else:
            return


def check(target: Target, problem: Problem) -> None:
    drawn = problem.draw()
    outputs, gradients, _ = drawn.ours(target.device, backend=target.name)
    truth, true_gradients = drawn.plain("float64", exact=True)
    close, _ = drawn.plain("float64" if problem.dtype == "float64" else "float32", exact=True)
    _, plain_gradients = drawn.plain()
    for made, right, near in zip(outputs, truth, close, strict=True):
        assert made.dtype == (torch.float64 if problem.dtype == "float64" else torch.float32)
        made = made.detach().double().cpu()
        assert torch.equal(made.isinf(), right.isinf())
        finite = right.isfinite()
        error, allowed = (((one.double() - right)[finite]).abs() for one in (made, near.detach()))
        size = right[finite].abs().amax() + 1 if finite.any() else torch.ones(())
        unit = UNITS["float64" if problem.dtype == "float64" else "float32"]
        assert not finite.any() or error.amax() <= 1.5 * allowed.amax() + 2 * unit * size
    for made, right, near, same in zip(gradients, true_gradients, plain_gradients, drawn.reference(), strict=True):
        np.testing.assert_allclose(right.detach().numpy(), same, rtol=1e-8, atol=1e-11)
        judge(made, right, near, problem.dtype)
