"""Statistics in MLX: gradients in compiled functions, and no work for a statistic whose gradient is not used."""

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.calls import upstream_of
from tests.cases import FUNCTIONS, LOG_PROBS, paired_cases
from tests.covering import FULL
from tests.options import option_cases
from tests.targets import Target
from xent.backends.mlx.kernels import Facts
from xent.command.check.case import Case, make_inputs, placed

COMPILED = ("all, statistics", "probabilities, all, statistics", "all, lse", "all, bias, shift")
CASES = [
    case
    for function in (*FUNCTIONS, *LOG_PROBS)
    for case in (paired_cases(function, ("float32",)) if FULL else option_cases(function, "float32"))
    if FULL or case.name in COMPILED or (case.name, case.reduction) == ("all", "mean")
]
LOGITS = mx.array(np.random.default_rng(11).normal(size=(24, 37)), mx.float32)
CLASSES = mx.arange(24)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_functions_have_the_same_gradients(target: Target, case: Case) -> None:
    """The matrix judges those of eager functions. The values of all arrays are unknown during tracing.

    On a CPU MLX compiles C++ for every fused operation, so that `nox -s full` alone has every pair of options.
    """
    inputs = make_inputs(case)
    options = placed(target.harness, inputs.options | {"target": inputs.target}, "float32")
    support, named = options.pop("support", None), tuple(inputs.differentiable)
    parts = [] if support is None else [support.ids, support.offsets]
    values = {name: one for name, one in options.items() if isinstance(one, mx.array)}
    rest = {name: one for name, one in (case.keywords | options).items() if name not in values}
    upstream = dict(zip(case.results, upstream_of(target, case, inputs), strict=True))

    def total(trained: list[mx.array], values: dict[str, mx.array], parts: list[mx.array]) -> mx.array:
        allowed = {"support": xent.Support(*parts)} if parts else {}
        arrays = dict(zip(named, trained, strict=True)) | values | allowed
        found = case.results_in(getattr(xent, case.function)(**arrays, **rest, backend=target.name))
        return sum(((found[name] * one).sum() for name, one in upstream.items() if one is not None), mx.array(0.0))

    step, arrays = mx.grad(total), (list(target.arrays(*inputs.differentiable.values())), values, parts)
    for one, other in zip(mx.compile(step)(*arrays), step(*arrays), strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=0, atol=2e-5 * mx.abs(other).max().item())


def test_unused_statistic_costs_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upstream gradient of an unused output is recognised as 0."""
    seen, kernel = [], target.backend.kernel()
    right = kernel.backward

    def watched(logits: mx.array, facts: Facts, norm: mx.array) -> mx.array:
        seen.append(set(facts.upstream))
        return right(logits, facts, norm)

    monkeypatch.setattr(kernel, "backward", watched)
    options = {"reduction": "none", "stats": ("lse", "entropy"), "backend": target.name}
    step = mx.grad(lambda z: xent.cross_entropy(z, CLASSES, **options)[0].sum())
    used = mx.grad(lambda z: xent.cross_entropy(z, CLASSES, **options)[1].lse.sum())
    for wrapped in (step, mx.compile(step), used):
        mx.eval(wrapped(LOGITS))
    assert seen == [set(), set(), {"lse", "H"}]
