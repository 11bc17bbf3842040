"""Helpers that call a backend with the arrays of a case."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import xent
from tests.options import LOG_PROB_OPTIONS, option_cases
from tests.targets import Target
from xent.command.check.case import LOSSES, Case, Inputs, placed
from xent.core.spec import LOG_PROB_STATS

__all__ = ["OPTIONS", "PROMISED", "WITHOUT_RANK", "call_of", "log_prob_case", "results_of", "upstream_of"]

WITHOUT_SUPPORT = {"temperature": "rows", "softcap": 5.0, "logit_scale": 0.8}
OPTIONS = {"plain": {}, "rows": WITHOUT_SUPPORT, "support": LOG_PROB_OPTIONS["all"]}


def call_of(target: Target, case: Case, inputs: Inputs, /, **more: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of the differentiable arrays, and these arrays on the device; `more` overrides options."""
    options = placed(target.harness, inputs.options | {case.target: inputs.target}, "float32") | case.keywords | more
    names = tuple(inputs.differentiable)

    def call(*arrays: Any) -> Any:
        named = dict(zip(names, arrays, strict=True))
        return getattr(xent, case.function)(**named, **options, backend=target.name)

    return call, target.arrays(*inputs.differentiable.values(), dtype=case.dtype)


def log_prob_case(function: str, options: str, dtype: str = "float32", **more: Any) -> Case:
    shifted = {"bias": True, "shift": 2} if function == "linear_log_probs" and options != "plain" else {}
    case = Case(function, (2, 6), 67, dtype, options, OPTIONS[options], "none", entropy=True, stats=("lse",))
    return replace(case, **(shifted | more))


def _promised() -> list[Case]:
    """Return a case of every function for each kind of argument that its rows have."""
    names = ("plain", "all", "probabilities, all")
    losses = [case for function in LOSSES for case in option_cases(function, "float32") if case.name in names]
    losses = [case for case in losses if case.reduction != "sum"]
    rows = [log_prob_case(function, options) for function in ("log_probs", "linear_log_probs") for options in OPTIONS]
    weighted = Case("divergence", (2, 6), 67, "float32", "", {"sample_weight": True}, "none")
    dense = replace(weighted, options=weighted.options | {"beta": 0.3})
    taught = [dense, replace(dense, teacher="linear"), replace(weighted, teacher="bucket")]
    linear = [replace(case, function="linear_divergence", bias=True, workspace=67 * 8 * 5) for case in taught]
    return losses + rows + taught + linear


PROMISED = _promised()
WITHOUT_RANK = tuple(name for name in LOG_PROB_STATS if name != "rank")
"""The statistics that do not change the bits of log-probabilities. With "rank" no tiles of logits are overwritten."""


def upstream_of(target: Target, case: Case, inputs: Inputs) -> tuple[Any, ...]:
    """Return the upstream gradient of each result, or None for those that have none."""
    given = {case.results[0]: inputs.upstream} | inputs.others
    placed = {name: target.arrays(np.asarray(one))[0] for name, one in given.items() if one is not None}
    return tuple(map(placed.get, case.results))


def results_of(
    target: Target, case: Case, inputs: Inputs, only: tuple[int, ...] | None = None, /, **more: Any
) -> list[Any]:
    """Return the results of a case, and the gradients of all differentiable arrays, or of those in `only`."""
    call, arrays = call_of(target, case, inputs, **more)
    chosen = range(len(arrays)) if only is None else only

    def of_some(*some: Any) -> Any:
        given = dict(zip(chosen, some, strict=True))
        returned = call(*(given.get(number, array) for number, array in enumerate(arrays)))
        return tuple(case.results_in(returned).values())

    found, gradients = target.harness.gradients(
        of_some, tuple(arrays[number] for number in chosen), upstream_of(target, case, inputs)
    )
    return [target.harness.numpy(array) for array in (*found, *gradients)]
