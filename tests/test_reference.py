"""The reference is the truth because finite differences say so (and PyTorch: torch/test_pytorch_agrees.py)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import xent
from tests.cases import FUNCTIONS
from xent.backends.reference import cross_entropy_gradient, linear_cross_entropy_gradients
from xent.core import validate
from xent.core.check.cases import Case, make_inputs, option_cases

STEP = 1e-6
DEFAULTS: dict[str, Any] = {
    "weight": None,
    "sample_weight": None,
    "normalizer": None,
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "softcap": None,
    "logit_scale": 1.0,
    "stats": (),
}
CASES = [
    replace(case, rows=(2, 5), vocabulary=7, hidden=3)
    for function in FUNCTIONS
    for case in option_cases(function, "float64")
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_is_the_slope_of_the_loss(case: Case) -> None:
    inputs = make_inputs(case)
    shift = {"shift": case.shift} if case.function == "linear_cross_entropy" else {}

    def total(**differentiable: Any) -> Any:
        call = getattr(xent, case.function)
        loss = call(**differentiable, target=inputs.target, reduction=case.reduction, **inputs.options, **shift)
        return (loss * inputs.upstream).sum()

    options = DEFAULTS | inputs.options | {"reduction": case.reduction, "target": inputs.target}
    if case.function == "cross_entropy":
        call = validate.logits_call(**inputs.differentiable, **options, axis=-1, inplace=False)
        analytic = (cross_entropy_gradient(call, inputs.upstream),)
    else:
        arrays = {"linear_bias": None} | inputs.differentiable
        linear = validate.linear_call(**arrays, **options, shift=case.shift, workspace=None)
        analytic = linear_cross_entropy_gradients(linear, inputs.upstream)
    for (name, values), gradient in zip(inputs.differentiable.items(), analytic, strict=False):
        numeric = np.empty_like(values)
        for index in np.ndindex(values.shape):
            ends = []
            for sign in (1, -1):
                moved = values.copy()
                moved[index] += sign * STEP
                ends.append(total(**(inputs.differentiable | {name: moved})))
            numeric[index] = (ends[0] - ends[1]) / (2 * STEP)
        np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=2e-8)
