"""A second call gives the same as in a fresh process, whatever first call was made before it.

Compared are results bit by bit, gradients, warnings and error messages. This finds anything that a call keeps and that
depends on something in which the two calls of a pair differ.
"""

import gc
import json
import subprocess
import sys
import weakref
from functools import cache, partial
from typing import Any

import pytest
import torch

import xent
from tests.targets import Target
from tests.torch.second_calls import FUNCTIONS, SAMPLE, pairs_of


def outcomes(target: Target, function: str) -> Any:
    program = [sys.executable, "-W", "ignore", "-m", "tests.torch.second_calls", target.name, target.device, function]
    return json.loads(subprocess.run(program, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def found(target: Target) -> Any:
    """Return a function that returns the results of all pairs of a function, from one process and its forks."""
    return cache(partial(outcomes, target))


@pytest.mark.parametrize(
    ("function", "pair"), [(function, pair) for function in FUNCTIONS for pair in pairs_of(function)]
)
def test_second_call_equals_a_fresh_process(target: Target, found: Any, function: str, pair: str) -> None:
    if target.device != "cpu" and pair not in SAMPLE:
        pytest.skip("an accelerator takes seconds to start in each process: a sample runs on it, all of them on CPUs")
    result = found(function)[pair]
    assert result["alone"][0] not in ("failed", "died"), result["alone"]
    assert result["after"] == result["alone"]
    assert result["back"] == result["first"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_pairs_differ(found: Any, function: str) -> None:
    """Nearly all pairs have different results, so that a cache that confuses them is noticed."""
    results = found(function)
    same = {name for name, result in results.items() if result["alone"] == result["first"]}
    assert len(same) < len(results) / 3, same


@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_is_kept_alive(target: Target, function: str, reduction: str) -> None:
    tensors = {
        "weight": torch.ones(12, device=target.device),
        "sample_weight": torch.ones(6, device=target.device),
        "normalizer": torch.tensor(3.0, device=target.device) if reduction == "mean" else None,
        "target": torch.arange(6, device=target.device),
    }
    if function == "cross_entropy":
        tensors["logits"] = torch.randn(6, 12, device=target.device, requires_grad=True)
    else:
        tensors["input"] = torch.randn(6, 8, device=target.device, requires_grad=True)
        tensors["linear_weight"] = torch.randn(12, 8, device=target.device, requires_grad=True)
        tensors["linear_bias"] = torch.randn(12, device=target.device, requires_grad=True)
    for _ in range(2):
        loss, stats = getattr(xent, function)(**tensors, reduction=reduction, stats=("lse",), backend=target.name)
        loss.sum().backward()
    kept = (*tensors.values(), loss, stats.lse)
    references = [weakref.ref(tensor) for tensor in kept if tensor is not None]
    del tensors, kept, loss, stats
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.parametrize("function", ["cross_entropy", "linear_cross_entropy", "log_probs", "linear_log_probs"])
def test_backends_of_other_types_are_refused_by_name(function: str) -> None:
    sources = (torch.zeros(3, 4),) if "linear" not in function else (torch.zeros(3, 5), torch.zeros(4, 5))
    with pytest.raises(TypeError, match=r"backend must be 'auto' or one of .*, got \['torch'\]"):
        getattr(xent, function)(*sources, torch.tensor([0, 1, 2]), backend=["torch"])
